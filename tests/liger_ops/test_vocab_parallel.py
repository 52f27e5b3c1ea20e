"""Losses, scores and divergences of heads that are spread over ranks against whole logits in float64."""

from typing import Any

import pytest
import torch

from tests.liger_ops.workers.vocab_parallel import MAKERS, is_of_vocabulary, make, with_gradients
from tests.lightning_liger.strategies.workers.distributed import NUM_RANKS, launch


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of the two ranks that share heads; on CPUs, whose group is not that of all ranks."""
    worker, folder = "tests.liger_ops.workers.vocab_parallel", tmp_path_factory.mktemp("ranks")
    num_ranks = 3 if request.param == "cpu" else NUM_RANKS
    return launch(request.param, folder, worker=worker, num_ranks=num_ranks)[-2:]


@pytest.mark.parametrize("name", MAKERS)
def test_results_and_gradients_are_those_of_the_whole_head(ranks: list[dict[str, Any]], name: str) -> None:
    run = make(name)
    double = {key: each.detach().double().requires_grad_(each.requires_grad) for key, each in run.tensors.items()}
    truth, gradients = with_gradients(run.compute(double, None), double)
    dtype = run.weight.dtype
    tolerance = {torch.float64: 1e-9, torch.float32: 3e-5}.get(dtype, 8 * torch.finfo(dtype).eps)
    close: Any = {"check_dtype": False, "equal_nan": True, "rtol": tolerance}
    (results, found), (others, found_by_other) = (each[name] for each in ranks)
    torch.testing.assert_close(results, others, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(results, truth, atol=tolerance, **close)
    assert found.keys() == gradients.keys()
    for key, expected in gradients.items():
        own, other = found[key], found_by_other[key]
        if is_of_vocabulary(key):
            own = torch.cat((own, other))
        elif not run.sums_input_gradient:
            assert not torch.allclose(own, other)
            own = own + other
        else:
            assert torch.equal(own, other)
        torch.testing.assert_close(own, expected, atol=tolerance * max(1.0, expected.abs().max().item()), **close)
