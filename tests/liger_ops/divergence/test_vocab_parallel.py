"""Divergences of heads that are spread over ranks against whole heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.liger_ops.divergence.test_linear_divergence import assert_same, leaves_of, with_gradients
from tests.liger_ops.divergence.workers.vocab_parallel import OF_VOCABULARY, RUNS, models_of, options_of
from tests.lightning_liger.strategies.workers.distributed import launch


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of two ranks, of which the second has fewer classes."""
    folder = tmp_path_factory.mktemp("ranks")
    return launch(request.param, folder, worker="tests.liger_ops.divergence.workers.vocab_parallel", num_ranks=2)


@pytest.mark.parametrize("name", RUNS)
def test_divergences_and_gradients_are_those_of_whole_heads(ranks: list[dict[str, Any]], name: str) -> None:
    run, models = RUNS[name], models_of(name)
    whole = models.to(torch.float64)
    expected = with_gradients(whole.run(**options_of(name, "cpu")), leaves_of(whole))
    results = [result[name] for result in ranks]
    tolerance = 2e-5 if run.by_kernels else 1e-10
    assert torch.equal(results[0][0], results[1][0])
    names = [each for each in type(models)._fields if each in run.trained]
    for place, parts in enumerate(zip(*results, strict=True)):
        is_cut = place > 0 and names[place - 1] in OF_VOCABULARY
        found = torch.cat(parts) if is_cut else parts[0]
        if not is_cut:
            assert torch.equal(*parts)
        assert_same([found], [expected[place]], (name, place), tolerance)
