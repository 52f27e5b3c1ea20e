"""linear_cross_entropy of a head that is spread over ranks against float64 PyTorch with the whole head."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_ops import TokenStats, VocabShard, linear_cross_entropy
from tests.liger_ops.accuracy import assert_as_accurate
from tests.liger_ops.loss.cases import assert_stats_match_plain, plain_cross_entropy
from tests.liger_ops.loss.workers.vocab_parallel import CASES, gradients_of, make_inputs
from tests.lightning_liger.strategies.workers.distributed import NUM_RANKS, launch


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request, tmp_path_factory):
    """The device and the results of each rank; three ranks share 123 classes evenly, and most others not."""
    num_ranks = 3 if request.param == "cpu" else NUM_RANKS
    folder = tmp_path_factory.mktemp("ranks")
    worker = "tests.liger_ops.loss.workers.vocab_parallel"
    return request.param, launch(request.param, folder, worker=worker, num_ranks=num_ranks)


def plain(name: str, tensors: list[Tensor], labels: Tensor, upstream: Tensor, options: dict) -> list[Tensor]:
    """The loss and its gradients through whole logits."""
    tensors = list(tensors)
    wanted = gradients_of(name, tensors)
    loss = plain_cross_entropy(whole_logits(tensors), labels, **options)
    return [loss, *torch.autograd.grad(loss, wanted, upstream.to(loss))]


def whole_logits(tensors: list[Tensor]) -> Tensor:
    logits = F.linear(*tensors[:3])
    return logits + F.linear(*tensors[3:]) if tensors[3:] else logits


@pytest.mark.parametrize("name", CASES)
def test_loss_stats_and_gradients_are_those_of_the_whole_head(ranks, name):
    _, results = ranks
    case = CASES[name]
    results = [result[name] for result in results[: 2 if case.is_pair else None]]
    tensors, labels, options, upstream = make_inputs(name, "cpu")
    in_double = [tensor.double() for tensor in tensors]
    truth = plain(name, in_double, labels, upstream, options)
    rounded = [tensor.bfloat16() for tensor in tensors] if case.extra == "autocast" else tensors
    eager = plain(name, rounded, labels, upstream, options)

    for result in results[1:]:
        assert torch.equal(result["loss"], results[0]["loss"]) or case.extra == "ignored"
        assert all(map(torch.equal, result["stats"], results[0]["stats"]))
        assert torch.equal(result["gradients"][0], results[0]["gradients"][0])
    gradients = list(zip(*(result["gradients"] for result in results), strict=True))
    whole = [parts[0] if index in (0, 3) else torch.cat(parts) for index, parts in enumerate(gradients)]
    if case.extra == "ignored":
        assert results[0]["loss"].isnan()
        assert all(not gradient.any() for gradient in whole)
        return
    # Half precision rounds each rank's part of the hidden states' gradient, and their sum.
    factor = 2.0 if case.dtype.itemsize > 2 else 4.0
    actual = [results[0]["loss"], *whole]
    for index, values in enumerate(zip(actual, eager, truth, strict=True)):
        if case.dtype == torch.float64:
            torch.testing.assert_close(values[0], values[2], rtol=1e-12, atol=1e-14)
            continue
        assert_as_accurate(f"result {index}", *values, factor=factor)
    if case.dtype == torch.float32 and case.extra not in ("autocast", "impossible"):
        loss_options = {key: value for key, value in options.items() if key != "reduction"}
        assert_stats_match_plain(TokenStats(*results[0]["stats"]), whole_logits(tensors), labels, **loss_options)


def test_hidden_states_gradient_can_be_summed_by_the_caller(ranks):
    _, results = ranks
    parts = [result["part"]["gradients"][0] for result in results]
    assert not torch.equal(parts[0], parts[1])
    torch.testing.assert_close(sum(parts), results[0]["plain"]["gradients"][0])
    for result in results:
        assert torch.equal(result["part"]["gradients"][1], result["plain"]["gradients"][1])


ONE_RANK = dist.ProcessGroup(0, 1)  # it can do nothing: arguments are refused before any rank speaks


def test_labels_and_class_weights_are_those_of_the_whole_vocabulary():
    shard = VocabShard(ONE_RANK, 5, 10)
    x, weight = torch.randn(2, 4), torch.randn(5, 4)
    with pytest.raises(ValueError, match="target must be between 0 and vocab_size - 1 = 9"):
        linear_cross_entropy(x, weight, torch.tensor([0, 10]), vocab_shard=shard)
    with pytest.raises(ValueError, match=r"weight must have shape \(10,\)"):
        linear_cross_entropy(x, weight, torch.tensor([0, 9]), weight=torch.ones(5), vocab_shard=shard)
    with pytest.raises(ValueError, match="vocab_shard must be None for class probabilities"):
        linear_cross_entropy(x, weight, torch.rand(2, 5), vocab_shard=shard)
