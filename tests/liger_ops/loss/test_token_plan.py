"""Which tokens count: order, number and the mean's factor, and the sum of their losses, on both paths."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from liger_ops import backend
from liger_ops.loss import token_plan
from liger_ops.loss.options import Targets
from liger_ops.loss.token_plan import plan_tokens, reduce_losses

VOCAB = 11
BLOCK = 8
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK + 5]  # below, at and past one block of the kernel


@pytest.fixture(params=["kernel", "reference"])
def like(request: pytest.FixtureRequest, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """A tensor that the plan is made for, on the Triton path with small blocks or on the PyTorch path."""
    monkeypatch.setattr(token_plan, "_BLOCK_SIZE", BLOCK)
    if request.param == "reference":
        monkeypatch.setattr(backend, "use_triton", lambda tensor: False)
    return torch.empty(1, device=triton_device)


def make_labels(num_tokens: int, ignore_index: int, share_ignored: float = 0.4) -> Tensor:
    labels = torch.randint(VOCAB, (num_tokens,))
    return labels.masked_fill(torch.rand(num_tokens) < share_ignored, ignore_index)


@pytest.mark.parametrize("ignore_index", [-100, 0])
@pytest.mark.parametrize("share_ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_kept_tokens_come_first_in_their_order(
    num_tokens: int, share_ignored: float, ignore_index: int, like: Tensor
) -> None:
    labels = make_labels(num_tokens, ignore_index, share_ignored)
    kept = [token for token, label in enumerate(labels.tolist()) if label != ignore_index]
    others = [token for token, label in enumerate(labels.tolist()) if label == ignore_index]
    plan = plan_tokens(Targets(labels.to(like.device), None, None), VOCAB, ignore_index, like, with_order=True)
    assert (plan.order.dtype, plan.num_kept.dtype, plan.mean_scale.dtype) == (torch.int64, torch.int64, torch.float32)
    assert plan.order.tolist() == kept + others
    assert plan.num_kept.shape == plan.mean_scale.shape == ()
    assert plan.num_kept == len(kept)
    assert plan.mean_scale.item() == pytest.approx(1 / len(kept) if kept else 0.0)


@pytest.mark.parametrize("with_order", [False, True], ids=["", "order"])
@pytest.mark.parametrize("weights", ["class", "token", "class+token"])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_mean_scale_is_one_over_the_summed_weight(
    num_tokens: int, weights: str, with_order: bool, like: Tensor
) -> None:
    labels = make_labels(num_tokens, -100)
    kept = labels != -100
    class_weight = torch.rand(VOCAB) + 0.5 if "class" in weights else None
    token_weight = torch.rand(num_tokens) if "token" in weights else None
    total = torch.ones(num_tokens, dtype=torch.float64)
    if class_weight is not None:
        total *= class_weight.double()[labels.where(kept, 0)]
    if token_weight is not None:
        total *= token_weight.double()
        token_weight[~kept] = torch.nan  # of no interest
    total = total[kept].sum().item()
    targets = Targets(*(None if t is None else t.to(like.device) for t in (labels, class_weight, token_weight)))
    plan = plan_tokens(targets, VOCAB, -100, like, with_order=with_order)
    assert plan.mean_scale.item() == pytest.approx(1 / total if total else 0.0, rel=1e-6)
    if with_order:
        assert plan.num_kept == kept.sum()
    else:
        assert (plan.order, plan.num_kept) == (None, None)


@pytest.mark.parametrize("which", ["class", "token"])
def test_summed_weight_of_zero_scales_by_zero(which: str, like: Tensor) -> None:
    labels = torch.tensor([3, 4, -100], device=like.device)
    zeros = torch.zeros(VOCAB if which == "class" else 3, device=like.device)
    targets = Targets(labels, *((zeros, None) if which == "class" else (None, zeros)))
    plan = plan_tokens(targets, VOCAB, -100, like, with_order=True)
    assert plan.mean_scale == 0
    assert plan.num_kept == 2


def test_weights_of_low_precision_are_summed_in_float32(like: Tensor) -> None:
    labels = make_labels(300, -100, 0.0)
    class_weight, token_weight = (torch.rand(VOCAB) + 0.5).bfloat16(), torch.rand(300).bfloat16()
    total = (class_weight.double()[labels] * token_weight.double()).sum().item()
    targets = Targets(*(tensor.to(like.device) for tensor in (labels, class_weight, token_weight)))
    plan = plan_tokens(targets, VOCAB, -100, like.bfloat16(), with_order=False)
    assert plan.mean_scale.dtype == torch.float32
    assert plan.mean_scale.item() == pytest.approx(1 / total, rel=1e-6)


@pytest.mark.parametrize("label", [-1, VOCAB, 2**40])
def test_label_that_is_no_class_counts_and_weighs_nothing(label: int, like: Tensor) -> None:
    labels = torch.tensor([3, label, -100, 4], device=like.device)
    class_weight = torch.linspace(1, 2, VOCAB, device=like.device)
    plan = plan_tokens(Targets(labels, class_weight, None), VOCAB, -100, like, with_order=True)
    assert plan.order.tolist() == [0, 1, 3, 2]
    assert plan.num_kept == 3
    assert plan.mean_scale.item() == pytest.approx(1 / (1.3 + 1.4))


def test_float64_is_planned_in_float64() -> None:
    labels = torch.tensor([3, 4, -100])
    plan = plan_tokens(Targets(labels, None, None), VOCAB, -100, torch.empty(1, dtype=torch.float64), with_order=False)
    assert plan.mean_scale.dtype == torch.float64


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("scale", [None, 0.3], ids=["sum", "mean"])
def test_reduced_loss_is_the_scaled_sum(scale: float | None, num_tokens: int, like: Tensor) -> None:
    losses = torch.randn(num_tokens, device=like.device)
    before = losses.clone()
    mean_scale = None if scale is None else torch.tensor(scale, device=like.device)
    loss = reduce_losses(losses, mean_scale)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    torch.testing.assert_close(loss.double(), losses.double().sum() * (1.0 if scale is None else mean_scale.double()),
                               check_dtype=False, rtol=1e-6, atol=1e-6)  # fmt: skip
    assert torch.equal(losses, before)


def test_mean_of_nothing_is_nan_and_the_sum_zero(like: Tensor) -> None:
    for losses in (torch.zeros(0, device=like.device), torch.zeros(3, device=like.device)):
        assert reduce_losses(losses, torch.zeros((), device=like.device)).isnan()
        assert reduce_losses(losses, None) == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_losses_that_are_not_finite_show(value: float, like: Tensor) -> None:
    losses = torch.ones(3 * BLOCK, device=like.device)
    losses[2 * BLOCK + 1] = value
    loss = reduce_losses(losses, torch.tensor(0.5, device=like.device))
    torch.testing.assert_close(loss.item(), value, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [2048, 2049, 100_003])
@pytest.mark.parametrize(
    "function",
    [
        lambda labels, losses: plan_tokens(Targets(labels, None, None), VOCAB, -100, losses, with_order=True),
        lambda labels, losses: [reduce_losses(losses, None)],
    ],
    ids=["plan", "reduce"],
)
def test_blocks_of_full_size_give_the_reference(
    function: Callable[[Tensor, Tensor], list[Tensor]], num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, losses = make_labels(num_tokens, -100).cuda(), torch.rand(num_tokens, device="cuda")
    actual = function(labels, losses)
    monkeypatch.setattr(backend, "use_triton", lambda tensor: False)
    for one, other in zip(actual, function(labels, losses), strict=True):
        torch.testing.assert_close(one, other)
