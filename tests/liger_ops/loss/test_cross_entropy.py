"""cross_entropy against plain float64 PyTorch, on the Triton kernels and on the PyTorch reference.

What the two kernels compute, and at their block borders, is in test_row_kernels.
"""

import importlib
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import TokenStats, backend, cross_entropy
from liger_ops.loss.cross_entropy import cross_entropy_reference
from liger_ops.loss.options import REDUCTIONS, Targets, TokenLossOptions
from tests.liger_ops.accuracy import assert_as_accurate

MODULE = importlib.import_module("liger_ops.loss.cross_entropy")  # the package's attribute of that name is the function
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignore_index=0": {"ignore_index": 0},
    "ignore_index=-1": {"ignore_index": -1},
    "label_smoothing": {"label_smoothing": 0.1},
    "label_smoothing=1": {"label_smoothing": 1.0},
    "class_weight": {"weight": "random"},
    "class_weight+smoothing": {"weight": "random", "label_smoothing": 0.2},
    "token_weight": {"token_weight": "random"},
    "softcap": {"softcap": 3.0},
    "logit_scale": {"logit_scale": 0.25},
    "z_loss": {"z_loss_weight": 1e-2},
    "class_weight+z_loss": {"weight": "random", "z_loss_weight": 1e-2},
    "everything": {
        "ignore_index": -1, "weight": "random", "label_smoothing": 0.1, "token_weight": "random", "softcap": 8.0,
        "logit_scale": 0.5, "z_loss_weight": 1e-2,
    },
}  # fmt: skip


def make_options(name: str, num_tokens: int, vocab_size: int, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Keyword arguments of cross_entropy; one of the random token weights is zero."""
    options = dict(OPTIONS[name])
    if "weight" in options:
        options["weight"] = torch.rand(vocab_size, device=device) + 0.5
    if "token_weight" in options:
        options["token_weight"] = 2 * torch.rand(num_tokens, device=device)
        options["token_weight"][1:2] = 0.0
    return options


def make_batch(
    num_tokens: int,
    vocab_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Logits of spread 4 and labels that hold the first class, the last class and, from 4 tokens on, ignored ones."""
    logits = (4 * torch.randn(num_tokens, vocab_size)).to(device, dtype)
    labels = torch.randint(vocab_size, (num_tokens,))
    labels[:1] = vocab_size - 1
    labels[2:3] = 0
    labels[3::4] = ignore_index
    return logits, labels.to(device)


def make_case(
    name: str, num_tokens: int, vocab_size: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Logits, labels and options that go together."""
    options = make_options(name, num_tokens, vocab_size, device)
    ignore_index = options.get("ignore_index", -100)
    return *make_batch(num_tokens, vocab_size, dtype=dtype, device=device, ignore_index=ignore_index), options


def plain_transform(logits: Tensor, softcap: float | None = None, logit_scale: float = 1.0) -> Tensor:
    """Half precision logits are widened first, as Hugging Face's loss does."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def plain_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    reduction: str = "mean",
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss_weight: float = 0.0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss in plain PyTorch; class weights do not apply to the z-loss, nor to what its mean divides by."""
    z = plain_transform(logits, softcap, logit_scale)
    kept = labels != ignore_index
    weight = z.new_ones(z.shape[-1]) if weight is None else weight.to(z)
    token_weight = z.new_ones(labels.shape) if token_weight is None else token_weight.to(z)
    losses = F.cross_entropy(
        z, labels, weight, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    losses = token_weight * losses
    z_losses = token_weight * z_loss_weight * (torch.logsumexp(z, -1) ** 2).where(kept, 0.0)
    if reduction == "none":
        return losses + z_losses
    if reduction == "sum":
        return losses.sum() + z_losses.sum()
    mean = losses.sum() / (weight[labels.where(kept, 0)] * token_weight)[kept].sum()
    return mean + z_losses.sum() / token_weight[kept].sum() if z_loss_weight else mean


def plain_stats(logits: Tensor, labels: Tensor, **options: Any) -> TokenStats:
    """The stats in plain PyTorch."""
    ignore_index = options.get("ignore_index", -100)
    kept = labels != ignore_index
    z = plain_transform(logits, options.get("softcap"), options.get("logit_scale", 1.0))
    is_largest = z == z.amax(-1, keepdim=True)
    predictions = torch.arange(z.shape[-1], device=z.device).where(is_largest, z.shape[-1]).amin(-1)
    of_label = z.gather(-1, labels.where(kept, 0)[:, None])[:, 0]
    return TokenStats(
        losses=plain_cross_entropy(logits, labels, reduction="none", **options),
        log_probs=(of_label - z.logsumexp(-1)).where(kept, 0.0),
        lse=z.logsumexp(-1).where(kept, 0.0),
        entropy=torch.special.entr(z.softmax(-1)).sum(-1).where(kept, 0.0),
        predictions=predictions.where(kept, ignore_index),
        correct=(predictions == labels) & kept,
    )


def assert_stats_match_plain(stats: TokenStats, logits: Tensor, labels: Tensor, **options: Any) -> None:
    """Compares flat stats field by field."""
    assert isinstance(stats, TokenStats)
    assert not any(stat.requires_grad for stat in stats)
    eager, truth = (plain_stats(some_logits, labels, **options) for some_logits in (logits, logits.double()))
    for field in TokenStats._fields[:4]:
        actual = getattr(stats, field)
        assert actual.dtype == torch.float32
        # Plain PyTorch adds up what each class has to say; we take two sums from each other, without a second pass.
        is_difference = field == "entropy"
        factor, magnitude = (4.0, math.log(logits.shape[-1])) if is_difference else (2.0, 0.0)
        assert_as_accurate(
            field, actual, getattr(eager, field), getattr(truth, field), factor=factor, magnitude=magnitude
        )
    assert torch.equal(stats.predictions, truth.predictions)
    assert torch.equal(stats.correct, truth.correct)


def loss_and_gradient(
    function: Callable[..., Tensor], logits: Tensor, labels: Tensor, upstream: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    loss = function(leaf, labels, **options)
    (gradient,) = torch.autograd.grad(loss, leaf, None if upstream is None else upstream.to(loss))
    return loss, gradient


def assert_matches_plain(logits: Tensor, labels: Tensor, upstream: Tensor | None = None, **options: Any) -> None:
    truth = loss_and_gradient(plain_cross_entropy, logits.double(), labels, upstream, **options)
    eager = loss_and_gradient(plain_cross_entropy, logits, labels, upstream, **options)
    actual = loss_and_gradient(cross_entropy, logits, labels, upstream, **options)
    assert (actual[0].dtype, actual[1].dtype) == (torch.float32, logits.dtype)
    assert_as_accurate("loss", actual[0], eager[0], truth[0])
    assert_as_accurate("gradient", actual[1], eager[1], truth[1])


# Kernels differ between float32 and half precision, not between the two of those.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in OPTIONS),
        *itertools.product(["plain", "everything"], DTYPES[1:]),
        ("class_weight+smoothing", torch.bfloat16),
        ("softcap", torch.bfloat16),
    ],
    ids=str,
)
def test_losses_and_gradient_match_plain_pytorch_for_every_option(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    logits, labels, options = make_case(name, 4, 123, device, dtype)
    assert_matches_plain(logits, labels, torch.randn(4), reduction="none", **options)


# A reduction of float16 logits goes the way of single losses, met above by every option.
@pytest.mark.parametrize(
    ("name", "reduction", "dtype"),
    [
        *((name, "mean", torch.float32) for name in OPTIONS),
        *(("everything", reduction, dtype) for reduction in ("mean", "sum") for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_reduced_loss_and_gradient_match_plain_pytorch_for_every_option(
    name: str, reduction: str, dtype: torch.dtype, device: torch.device
) -> None:
    logits, labels, options = make_case(name, 4, 123, device, dtype)
    assert_matches_plain(logits, labels, torch.tensor(-1.5), reduction=reduction, **options)


# The fewest classes that say something, odd sizes, a row that fills a power of two and one that just does not.
@pytest.mark.parametrize(
    ("num_tokens", "vocab_size"), [(5, 2), (1, 507), (3, 1024), (2, 4097)], ids=lambda size: str(size)
)
@pytest.mark.parametrize(("reduction", "name"), [("none", "everything"), ("mean", "class_weight"), ("sum", "plain")])
def test_loss_and_gradient_match_plain_pytorch_for_every_size(
    num_tokens: int, vocab_size: int, reduction: str, name: str, device: torch.device
) -> None:
    logits, labels, options = make_case(name, num_tokens, vocab_size, device)
    upstream = torch.randn(num_tokens) if reduction == "none" else None
    assert_matches_plain(logits, labels, upstream, reduction=reduction, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_class_leaves_nothing_to_learn(reduction: str, device: torch.device) -> None:
    logits, labels = make_batch(7, 1, device=device)
    upstream = torch.randn(7) if reduction == "none" else None
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels, upstream, reduction=reduction)
    assert not loss.any()
    assert not gradient.any()


@pytest.mark.parametrize(
    ("reduction", "upstream", "dtype"),
    [
        pytest.param("none", torch.linspace(-2, 3, 5), torch.bfloat16, id="per_token"),
        pytest.param("none", torch.linspace(-2, 3, 10)[::2], torch.float32, id="strided"),
        pytest.param("none", torch.tensor(0.3).expand(5), torch.float32, id="expanded"),
        pytest.param("mean", torch.tensor(1.0), torch.float32, id="one_of_mean"),
        pytest.param("mean", torch.tensor(-2.5), torch.bfloat16, id="scalar_of_mean"),
        pytest.param("mean", torch.tensor(-2.5), torch.float16, id="scalar_of_float16_mean"),
        pytest.param("sum", torch.tensor(1.0), torch.bfloat16, id="one_of_sum"),
        pytest.param("sum", torch.tensor(1024.0), torch.float32, id="scalar_of_sum"),
        pytest.param("sum", torch.tensor(0.0), torch.float32, id="zero"),
    ],
)
def test_gradient_scales_with_upstream_and_stays_for_a_second_backward(
    reduction: str, upstream: Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    logits, labels = make_batch(5, 123, dtype=dtype, device=device)
    assert_matches_plain(logits, labels, upstream, reduction=reduction)
    before = logits.clone(), labels.clone()
    logits.requires_grad_()
    loss = cross_entropy(logits, labels, reduction=reduction)
    upstream = upstream.to(device)
    upstream_before = upstream.clone()
    first, second = (torch.autograd.grad(loss, logits, upstream, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    (last,) = torch.autograd.grad(loss, logits, 2 * upstream)  # may reuse what the graph held
    torch.testing.assert_close(last, 2 * first)
    assert torch.equal(first, second)
    assert torch.equal(upstream, upstream_before)
    assert torch.equal(logits, before[0])
    assert torch.equal(labels, before[1])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_of_one_graph_accumulate_like_any(reduction: str, device: torch.device) -> None:
    logits, labels = make_batch(7, 123, device=device)
    _, once = loss_and_gradient(cross_entropy, logits, labels, reduction=reduction)
    logits.requires_grad_()
    loss = cross_entropy(logits, labels, reduction=reduction)
    (3 * loss).backward(retain_graph=True)
    (2 * loss).backward()
    torch.testing.assert_close(logits.grad, 5 * once)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_scale_keeps_float16_gradients_from_underflow(reduction: str, device: torch.device) -> None:
    logits, labels = make_batch(16, 123, dtype=torch.float16, device=device)
    upstream = torch.tensor(2.0**16 if reduction == "mean" else 2.0**12).expand(16 if reduction == "none" else ())
    _, truth = loss_and_gradient(plain_cross_entropy, logits.double(), labels, upstream, reduction=reduction)
    _, gradient = loss_and_gradient(cross_entropy, logits, labels, upstream, reduction=reduction)
    unscaled = truth / upstream.max()
    assert (unscaled[labels >= 0].half() == 0).any()  # which without the scale would be lost
    limits = torch.finfo(torch.float16)
    allowed = truth.abs() * limits.eps + limits.smallest_normal * limits.eps
    assert ((gradient.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_token_weight_scales_each_loss_and_the_mean_divides_by_its_sum(reduction: str, device: torch.device) -> None:
    logits, labels, options = make_case("everything", 5, 50, device)
    token_weight = options.pop("token_weight")
    del options["z_loss_weight"]  # whose mean divides by something else
    class_weight = options.get("weight", torch.ones(50, device=device))
    kept = labels != options.get("ignore_index", -100)
    losses = cross_entropy(logits, labels, reduction="none", **options)
    loss = cross_entropy(logits.requires_grad_(), labels, reduction=reduction, token_weight=token_weight, **options)
    weighted = losses * token_weight
    expected = {
        "none": weighted,
        "sum": weighted.sum(),
        "mean": weighted.sum() / (token_weight * class_weight[labels.where(kept, 0)])[kept].sum(),
    }[reduction]
    torch.testing.assert_close(loss.detach(), expected)
    loss.sum().backward()
    assert not logits.grad[1].any()  # of weight zero


@pytest.mark.parametrize("scale", [0.25, 64.0])
def test_scale_of_class_weights_does_not_change_the_mean(scale: float, device: torch.device) -> None:
    logits, labels, options = make_case("everything", 9, 50, device)
    expected = loss_and_gradient(cross_entropy, logits, labels, **options)
    options["weight"] = scale * options["weight"]
    torch.testing.assert_close(loss_and_gradient(cross_entropy, logits, labels, **options), expected)


def test_mean_z_loss_is_over_tokens_whatever_their_class_weights(device: torch.device) -> None:
    logits, labels = make_batch(9, 50, device=device)
    kept = labels != -100
    weight, token_weight = torch.rand(50, device=device) + 0.5, torch.rand(9, device=device)
    squares = logits.double().logsumexp(-1)[kept] ** 2
    for options in ({"weight": weight}, {"weight": weight, "token_weight": token_weight}):
        with_z_loss, without = (cross_entropy(logits, labels, z_loss_weight=z, **options) for z in (0.125, 0.0))
        factor = options.get("token_weight", torch.ones_like(token_weight))[kept]
        expected = 0.125 * (factor * squares).sum() / factor.sum()
        torch.testing.assert_close((with_z_loss - without).double(), expected, rtol=1e-5, atol=0)


def test_token_weight_of_an_ignored_token_does_not_matter(device: torch.device) -> None:
    logits, labels = make_batch(7, 123, device=device)
    token_weight = torch.rand(7, device=device)
    expected = loss_and_gradient(cross_entropy, logits, labels, token_weight=token_weight)
    actual = loss_and_gradient(cross_entropy, logits, labels, token_weight=token_weight.where(labels >= 0, 100.0))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_token_weight_may_be_of_another_dtype_and_layout(dtype: torch.dtype, device: torch.device) -> None:
    logits, labels = make_batch(8, 123, device=device)
    logits, labels = logits.view(2, 4, 123).movedim(-1, 1), labels.view(2, 4)
    token_weight = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 1.0], [1.0, 0.0]], device=device).t()
    expected = loss_and_gradient(cross_entropy, logits, labels, token_weight=token_weight.contiguous())
    actual = loss_and_gradient(cross_entropy, logits, labels, token_weight=token_weight.to(dtype))
    torch.testing.assert_close(actual, expected)


def test_class_weights_in_float64_are_those_in_float32(device: torch.device) -> None:
    logits, labels = make_batch(8, 123, device=device)
    weight = torch.rand(123, device=device)
    expected, actual = (loss_and_gradient(cross_entropy, logits, labels, weight=w) for w in (weight, weight.double()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("which", "dtype"),
    [("token_weight", torch.float32), ("token_weight", torch.float16), ("weight", torch.bfloat16)],
    ids=str,
)
def test_summed_weight_of_zero_gives_a_mean_of_nan_and_no_gradient(
    which: str, dtype: torch.dtype, device: torch.device
) -> None:
    logits, labels = make_batch(4, 123, dtype=dtype, device=device)
    weight = {which: torch.zeros(4 if which == "token_weight" else 123, device=device)}
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels, **weight)
    assert loss.isnan()
    assert not gradient.any()
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels, reduction="sum", **weight)
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize("which", ["token_weight", "weight"])
def test_mean_with_a_z_loss_is_nan_without_gradient_if_the_summed_weight_is_zero(
    which: str, device: torch.device
) -> None:
    logits, labels = make_batch(4, 123, device=device)
    options = {"weight": torch.ones(123, device=device), "token_weight": torch.ones(4, device=device)}
    options[which].zero_()
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels, z_loss_weight=0.1, **options)
    assert loss.isnan()
    assert not gradient.any()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda logits: logits.t().contiguous().t(),
    "every_other_class": lambda logits: logits.repeat_interleave(2, 1)[:, ::2],
    "rows_of_a_wider_tensor": lambda logits: F.pad(logits, (3, 5))[:, 3:-5],
    "one_row_for_all": lambda logits: logits[:1].expand(len(logits), -1),
}


@pytest.mark.parametrize(
    ("reduction", "inplace_backward"),
    [("none", False), ("mean", False), ("mean", True)],
    ids=["none", "mean", "mean_inplace_backward"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_logits_and_labels_does_not_matter(
    layout: str, reduction: str, inplace_backward: bool, device: torch.device
) -> None:
    logits, labels = make_batch(4, 123, device=device)
    strided = LAYOUTS[layout](logits)
    assert not strided.is_contiguous()
    upstream = torch.randn(4 if reduction == "none" else (), device=device)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    expected = loss_and_gradient(cross_entropy, strided.contiguous(), labels, upstream, **options)
    labels = labels.repeat_interleave(2)[::2]
    actual = loss_and_gradient(cross_entropy, strided, labels, upstream, inplace_backward=inplace_backward, **options)
    torch.testing.assert_close(actual, expected)


# Backward in place.


@pytest.mark.parametrize(
    ("name", "reduction", "dtype"),
    [
        ("plain", "mean", torch.bfloat16),
        ("everything", "sum", torch.float32),
        ("everything", "mean", torch.float16),
        ("everything", "none", torch.bfloat16),
    ],
    ids=str,
)
def test_inplace_backward_leaves_the_gradient_in_the_storage_of_the_logits(
    name: str, reduction: str, dtype: torch.dtype, device: torch.device
) -> None:
    logits, labels, options = make_case(name, 5, 123, device, dtype)
    options["reduction"] = reduction
    upstream = torch.randn(5 if reduction == "none" else (), device=device)
    eager = loss_and_gradient(plain_cross_entropy, logits, labels, upstream, **options)
    truth = loss_and_gradient(plain_cross_entropy, logits.double(), labels, upstream, **options)
    before = logits.clone()
    logits.requires_grad_()
    loss = cross_entropy(logits, labels, inplace_backward=True, **options)
    assert torch.equal(logits, before)
    (gradient,) = torch.autograd.grad(loss, logits, upstream)
    assert_as_accurate("loss", loss, eager[0], truth[0])
    assert_as_accurate("gradient", gradient, eager[1], truth[1])
    if backend.use_triton(logits):
        assert gradient.data_ptr() == logits.data_ptr()
        assert torch.equal(gradient, logits)
    else:
        assert torch.equal(logits, before)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_inplace_backward_passes_the_gradient_on(reduction: str, device: torch.device) -> None:
    hidden_states, weight = torch.randn(7, 8, device=device), torch.randn(123, 8, device=device)
    _, labels = make_batch(7, 123, device=device)
    results = []
    for inplace_backward in (False, True):
        leaves = hidden_states.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = cross_entropy(F.linear(*leaves), labels, reduction=reduction, inplace_backward=inplace_backward)
        results.append(torch.autograd.grad(loss.sum(), leaves))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_inplace_backward_allows_no_second_backward(reduction: str, triton_device: torch.device) -> None:
    logits, labels = make_batch(5, 123, device=triton_device)
    logits.requires_grad_()
    loss = cross_entropy(logits, labels, reduction=reduction, inplace_backward=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_backward_is_refused_while_another_function_needs_the_logits(triton_device: torch.device) -> None:
    logits, labels = make_batch(5, 123, device=triton_device)
    logits = 2 * logits.requires_grad_()
    penalty = logits.square().mean()
    loss = cross_entropy(logits, labels, inplace_backward=True) + penalty
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_backward_is_refused_while_another_function_needs_what_the_logits_are_a_view_of(
    triton_device: torch.device,
) -> None:
    logits, labels = make_batch(5, 123, device=triton_device)
    logits = 2 * logits.requires_grad_()
    penalty = logits.square().mean()
    loss = cross_entropy(logits[:-1], labels[:-1], inplace_backward=True) + penalty
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_backward_without_a_backward_changes_nothing(device: torch.device) -> None:
    logits, labels = make_batch(5, 123, device=device)
    logits.requires_grad_()
    before = logits.detach().clone()
    expected = cross_entropy(logits, labels)
    with torch.no_grad():
        loss = cross_entropy(logits, labels, inplace_backward=True)
    torch.testing.assert_close(loss, expected.detach())
    assert torch.equal(logits, before)


# Calls.


@pytest.mark.parametrize(
    ("shape", "arguments", "options"),
    [
        pytest.param((7, 11), ("weight", None, 3, None, "sum", 0.1), {}, id="all_positional"),
        pytest.param((7, 11), ("weight",), {"reduction": "none"}, id="weight_positional"),
        pytest.param((7, 11), ("weight",), {"label_smoothing": 0.2}, id="weighted_mean"),
        pytest.param((7, 11), (), {"size_average": False}, id="size_average=False"),
        pytest.param((7, 11), (None, False, -100, False), {}, id="reduce=False"),
        pytest.param((7, 11), (), {"reduce": True}, id="reduce=True"),
        pytest.param((11,), (), {}, id="no_batch"),
        pytest.param((2, 11, 5), ("weight",), {}, id="one_extra_dimension"),
        pytest.param((2, 11, 3, 2), (), {"reduction": "none", "label_smoothing": 0.2}, id="two_extra_dimensions"),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_calls_of_pytorchs_function_give_the_same(
    shape: tuple[int, ...], arguments: tuple, options: dict[str, Any], device: torch.device
) -> None:
    logits = torch.randn(shape, device=device)
    labels = torch.randint(11, shape[:1] + shape[2:] if len(shape) > 1 else (), device=device)
    arguments = tuple(torch.rand(11, device=device) if argument == "weight" else argument for argument in arguments)
    results = []
    for function in (cross_entropy, F.cross_entropy):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, labels, *arguments, **options)
        results.append((loss, *torch.autograd.grad(loss.sin().sum(), leaf)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "reduction": "sum"}], ids=["mean", "smoothed_sum"])
def test_class_probabilities_give_what_pytorch_gives(options: dict[str, Any], device: torch.device) -> None:
    logits, probabilities = torch.randn(7, 11, device=device), torch.rand(7, 11, device=device).softmax(-1)
    expected = loss_and_gradient(F.cross_entropy, logits, probabilities, **options)
    torch.testing.assert_close(loss_and_gradient(cross_entropy, logits, probabilities, **options), expected)


def test_signature_starts_with_pytorchs() -> None:
    ours, theirs = (
        [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (cross_entropy, F.cross_entropy)
    )
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize("inplace_backward", [False, True], ids=["", "inplace_backward"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("num_tokens", [0, 7], ids=["no_tokens", "all_ignored"])
def test_no_kept_token_gives_no_gradient_and_the_mean_of_nothing_is_nan(
    num_tokens: int, reduction: str, inplace_backward: bool, device: torch.device
) -> None:
    logits = torch.randn(num_tokens, 123, device=device)
    labels = torch.full((num_tokens,), -100, device=device)
    upstream = torch.ones(num_tokens) if reduction == "none" else None
    loss, gradient = loss_and_gradient(
        cross_entropy, logits, labels, upstream, reduction=reduction, z_loss_weight=0.1,
        inplace_backward=inplace_backward,
    )  # fmt: skip
    assert loss.isnan() if reduction == "mean" else not loss.any()
    assert torch.equal(gradient, torch.zeros_like(logits))


# Statistics.


@pytest.mark.parametrize(
    ("reduction", "with_gradient"), [("none", False), ("mean", False), ("none", True), ("mean", True), ("sum", True)]
)
@pytest.mark.parametrize(("name", "dtype"), [("plain", torch.float32), ("everything", torch.bfloat16)], ids=str)
def test_stats_match_plain_pytorch(
    name: str, dtype: torch.dtype, reduction: str, with_gradient: bool, device: torch.device
) -> None:
    logits, labels, options = make_case(name, 8, 123, device, dtype)
    labels[0] = logits[0].argmax()  # a prediction that is right
    leaf = logits.clone().requires_grad_(with_gradient)
    shaped = leaf.view(2, 4, 123).movedim(-1, 1)
    shaped_options = {key: value.view(2, 4) if key == "token_weight" else value for key, value in options.items()}
    loss, stats = cross_entropy(shaped, labels.view(2, 4), reduction=reduction, return_stats=True, **shaped_options)
    assert all(stat.shape == (2, 4) for stat in stats)
    assert not any(stat.requires_grad for stat in stats)
    assert_stats_match_plain(TokenStats(*(stat.flatten() for stat in stats)), logits, labels, **options)
    expected_loss, expected_gradient = loss_and_gradient(
        cross_entropy, logits, labels, torch.ones(8) if reduction == "none" else None, reduction=reduction, **options
    )
    torch.testing.assert_close(loss.detach().flatten(), expected_loss.detach().flatten())
    if with_gradient:
        loss.sum().backward()
        torch.testing.assert_close(leaf.grad, expected_gradient)
    else:
        assert not loss.requires_grad


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_stats_of_ignored_tokens_are_zero_false_and_the_ignore_index(reduction: str, device: torch.device) -> None:
    logits, labels = make_batch(8, 123, device=device, ignore_index=5)
    logits[3, 5] = 100.0  # predicted what is ignored
    logits[7, :] = torch.nan
    _, stats = cross_entropy(logits.requires_grad_(), labels, reduction=reduction, ignore_index=5, return_stats=True)
    for field, stat in stats._asdict().items():
        assert (stat[3::4] == (5 if field == "predictions" else 0)).all(), field


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("columns", [(3, 9), (7, 4098)], ids=["neighbours", "far_apart"])
def test_prediction_is_the_first_of_equal_logits(
    columns: tuple[int, int], reduction: str, device: torch.device
) -> None:
    logits = torch.zeros(1, 4101, device=device)
    logits[:, list(columns)] = 2.0
    labels = torch.tensor([columns[0]], device=device)
    _, stats = cross_entropy(logits.requires_grad_(), labels, reduction=reduction, return_stats=True)
    assert stats.predictions.tolist() == [columns[0]]
    assert stats.correct.tolist() == [True]


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("masked", [slice(100, None), slice(0, 60)], ids=["last_classes", "first_classes"])
def test_classes_masked_with_minus_infinity_take_no_part(masked: slice, reduction: str, device: torch.device) -> None:
    logits, _ = make_batch(3, 123, device=device)
    logits[:, masked] = -torch.inf
    allowed = logits[0].isfinite().nonzero()[:, 0]
    labels = allowed[torch.tensor([0, -1, 2], device=device)]
    assert_matches_plain(logits, labels, torch.randn(3 if reduction == "none" else ()), reduction=reduction)
    leaf = logits.clone().requires_grad_()
    loss, stats = cross_entropy(leaf, labels, reduction=reduction, return_stats=True)
    assert stats.entropy.isfinite().all()
    assert_stats_match_plain(stats, logits, labels)
    loss.sum().backward()
    assert not leaf.grad[:, masked].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_confident_logits_stay_finite_and_exact(reduction: str, dtype: torch.dtype, device: torch.device) -> None:
    logits, labels = make_batch(7, 123, dtype=dtype, device=device)
    logits[:, 5], logits[:, 9] = 1e4, -1e4
    labels[:3] = torch.tensor([5, 9, 20])  # certain and right, as wrong as can be, wrong
    assert_matches_plain(logits, labels, torch.randn(7 if reduction == "none" else ()), reduction=reduction)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_entropy_is_exact_and_not_negative_whatever_the_size_of_the_logits(
    reduction: str, device: torch.device
) -> None:
    logits = torch.randn(5, 123, device=device)
    logits[1] += 1e4
    logits[2] -= 1e4
    logits[3, 5] = 1e4  # certain
    logits[4] = -3e3  # knows nothing
    labels = torch.arange(5, device=device)
    _, stats = cross_entropy(logits.requires_grad_(), labels, reduction=reduction, return_stats=True)
    eager, truth = (plain_stats(some.detach(), labels).entropy for some in (logits, logits.double()))
    assert_as_accurate("entropy", stats.entropy, eager, truth)
    assert (stats.entropy >= 0).all()


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("offset", [-64.0, 4096.0, -4096.0])
def test_adding_a_constant_to_the_logits_changes_nothing(offset: float, reduction: str, device: torch.device) -> None:
    logits, labels = make_batch(4, 123, device=device)
    logits = (logits * 256).round() / 256  # so that the sum is exact
    upstream = torch.linspace(1, 2, 4) if reduction == "none" else torch.tensor(1.0)
    expected = loss_and_gradient(cross_entropy, logits, labels, upstream, reduction=reduction)
    actual = loss_and_gradient(cross_entropy, logits + offset, labels, upstream, reduction=reduction)
    torch.testing.assert_close(actual, expected)
    assert_matches_plain(logits + offset, labels, upstream, reduction=reduction)


@pytest.mark.parametrize("name", ["plain", "class_weight+smoothing"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_gradient_sums_to_zero_over_the_vocabulary(reduction: str, name: str, device: torch.device) -> None:
    logits, labels, options = make_case(name, 7, 507, device)
    upstream = torch.ones(7 if reduction == "none" else ())
    _, gradient = loss_and_gradient(cross_entropy, logits, labels, upstream, reduction=reduction, **options)
    # Each probability is the exponential of a difference that was rounded at the size of lse.
    eps = torch.finfo(torch.float32).eps
    allowed = eps * (2 + logits.abs().amax(-1) + logits.logsumexp(-1).abs()) * gradient.abs().sum(-1)
    assert (gradient.double().sum(-1).abs() <= allowed).all()
    assert gradient.abs().amax(-1)[labels >= 0].min() > 0.1


def test_permuting_tokens_permutes_losses_and_gradients(device: torch.device) -> None:
    logits, labels = make_batch(7, 123, device=device)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4], device=device)
    losses, gradient = loss_and_gradient(cross_entropy, logits, labels, torch.ones(7), reduction="none")
    permuted = loss_and_gradient(cross_entropy, logits[order], labels[order], torch.ones(7), reduction="none")
    torch.testing.assert_close(permuted, (losses[order], gradient[order]))


# Errors.


@pytest.mark.parametrize("label", [-1, 11, -101, 2**40])
def test_label_out_of_range_raises_on_the_cpu(label: int) -> None:
    labels = torch.tensor([3, label, -100])
    with pytest.raises(ValueError, match=rf"target must be between 0 and .*10, or .*-100; got {label} \(1 of 3"):
        cross_entropy(torch.randn(3, 11), labels)


@pytest.mark.parametrize(
    ("label", "name", "reduction"),
    [
        (-1, "plain", "none"),
        (-1, "class_weight+smoothing", "sum"),
        (123, "label_smoothing=1", "none"),
        (123, "plain", "sum"),
        (2**40, "class_weight+smoothing", "none"),
        (2**40, "label_smoothing=1", "sum"),
    ],
)
def test_label_out_of_range_gives_nan_in_its_row_alone_where_it_is_not_looked_at(
    label: int, name: str, reduction: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "check_labels", lambda *_: None)  # as on a GPU
    logits, labels, options = make_case(name, 4, 123, device)
    options["reduction"] = reduction
    upstream = torch.ones(4 if reduction == "none" else ())
    _, expected_gradient = loss_and_gradient(cross_entropy, logits, labels, upstream, **options)
    _, expected_stats = cross_entropy(logits, labels, return_stats=True, **options)
    labels[1] = label
    others = [0, 2, 3]
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels, upstream, **options)
    _, stats = cross_entropy(logits, labels, return_stats=True, **options)
    assert loss[1].isnan() if reduction == "none" else loss.isnan()
    assert gradient[1].isnan().all()
    torch.testing.assert_close(gradient[others], expected_gradient[others])
    assert stats.losses[1].isnan()
    assert stats.log_probs[1].isnan()
    assert not stats.correct[1]
    for actual, expected in zip(stats, expected_stats, strict=True):
        torch.testing.assert_close(actual[others], expected[others])
    for field in ("lse", "entropy", "predictions"):  # which do not ask for the label
        torch.testing.assert_close(getattr(stats, field)[1], getattr(expected_stats, field)[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "average"}, "reduction must be one of .* got 'average'"),
        ({"label_smoothing": 1.5}, "label_smoothing must be .* at most 1, got 1.5"),
        ({"softcap": 0.0}, "softcap must be .* above 0 or None, got 0.0"),
        ({"z_loss_weight": -1.0}, "z_loss_weight must be .* of at least 0, got -1.0"),
        ({"weight": torch.ones(10)}, r"weight must have shape \(11,\), got \(10,\)"),
        ({"token_weight": torch.ones(3)}, r"token_weight must have target's shape \(4,\), got \(3,\)"),
        ({"token_weight": torch.tensor(1.0)}, r"token_weight must have target's shape \(4,\), got \(\)"),
        ({"input": torch.tensor(1.0)}, r"target must have input's shape .* \(\), target \(4,\)"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, r"target must have input's shape .* \(4, 11\), target \(3,\)"),
        ({"target": torch.zeros(4, dtype=torch.int32)}, "target must hold class indices .* got torch.int32"),
        ({"target": torch.ones(4, 11), "softcap": 1.0}, "target must be class indices .* softcap"),
        ({"target": torch.ones(4, 11), "token_weight": torch.ones(4)}, "target must be class indices .* token_weight"),
        ({"target": torch.ones(4, 11), "inplace_backward": True}, "target must be class .* inplace_backward"),
        ({"target": torch.ones(4, 11), "return_stats": True}, "target must be class indices .* return_stats"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_raise(options: dict[str, Any], message: str) -> None:
    arguments = {"input": torch.randn(4, 11), "target": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        cross_entropy(**{**arguments, **options})


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivative_is_right_or_refused(reduction: str, device: torch.device) -> None:
    logits, labels = make_batch(3, 5, device=device)
    logits.requires_grad_()
    loss = cross_entropy(logits, labels, reduction=reduction).sum()
    if backend.use_triton(logits):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss, logits, create_graph=True)
        return
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    expected = torch.func.hessian(lambda x: F.cross_entropy(x, labels, reduction=reduction).sum())(logits.detach())
    torch.testing.assert_close(torch.autograd.grad(gradient.sum(), logits)[0], expected.sum((0, 1)))


@pytest.mark.parametrize("name", ["plain", "class_weight+smoothing", "everything"])
def test_reference_passes_gradcheck(name: str) -> None:
    options = make_options(name, 5, 7)
    logits, labels = make_batch(5, 7, dtype=torch.float64, ignore_index=options.get("ignore_index", -100))
    targets = Targets(labels, options.pop("weight", None), options.pop("token_weight", None))
    token_options = TokenLossOptions(**options)
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy_reference(x, targets, token_options).losses, logits.requires_grad_()
    )


# The compiler.


@pytest.mark.parametrize(
    ("reduction", "gradient", "with_stats", "name", "num_tokens"),
    [
        *(
            (*case, "plain" if case[0] == "mean" else "everything", 2)
            for case in itertools.product(REDUCTIONS, ["now", "later", "never"], [False, True])
        ),
        ("mean", "now", True, "everything", 0),
        ("none", "later", False, "everything", 0),
    ],
)
def test_forward_op_passes_opcheck(
    reduction: str, gradient: str, with_stats: bool, name: str, num_tokens: int, triton_device: torch.device
) -> None:
    logits, labels, options = make_case(name, num_tokens, 11, triton_device, torch.bfloat16)
    weights = options.pop("weight", None), options.pop("token_weight", None)
    scalars = TokenLossOptions(**options).as_scalars()
    torch.library.opcheck(
        torch.ops.liger_ops.cross_entropy_forward.default,
        (logits, labels, *weights, reduction, gradient, with_stats, *scalars),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_backward_op_passes_opcheck(name: str, num_tokens: int, triton_device: torch.device) -> None:
    logits, labels, options = make_case(name, num_tokens, 11, triton_device, torch.bfloat16)
    weights = options.pop("weight", None), options.pop("token_weight", None)
    grad_scale = torch.randn(num_tokens if name == "everything" else (), device=triton_device)
    lse = torch.randn(num_tokens, device=triton_device)
    torch.library.opcheck(
        torch.ops.liger_ops.cross_entropy_backward.default,
        (logits, labels, *weights, lse, 1e-7 * lse, grad_scale, *TokenLossOptions(**options).as_scalars()),
        test_utils=("test_schema", "test_faketensor"),
    )


COMPILED = {
    "mean+inplace_backward": {"reduction": "mean", "inplace_backward": True},  # which changes nothing here
    "mean+stats": {
        "reduction": "mean",
        "return_stats": True,
        "label_smoothing": 0.1,
        "softcap": 8.0,
        "z_loss_weight": 1e-2,
    },
    "none+stats": {"reduction": "none", "return_stats": True, "z_loss_weight": 1e-2, "ignore_index": 3},
}


def assert_compiled_gives_the_same(options: dict[str, Any], device: torch.device) -> None:
    logits, labels = make_batch(4, 123, device=device, ignore_index=options.get("ignore_index", -100))
    options |= {"weight": torch.rand(123, device=device), "token_weight": torch.rand(4, device=device)}
    torch._dynamo.reset()
    results = []
    for function in (cross_entropy, torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")):
        leaf = logits.clone().requires_grad_()
        eager_options = {"inplace_backward": False} if function is cross_entropy else {}
        result = function(leaf, labels, **{**options, **eager_options})
        loss, stats = result if isinstance(result, tuple) else (result, ())
        assert not any(stat.requires_grad for stat in stats)
        upstream = torch.linspace(-1, 2, 4, device=device) if options["reduction"] == "none" else None
        results.append((loss, *stats, *torch.autograd.grad(loss, leaf, upstream)))
        assert torch.equal(leaf, logits)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_one_graph_with_the_same_result(name: str, triton_device: torch.device) -> None:
    assert_compiled_gives_the_same(dict(COMPILED[name]), triton_device)


def test_reference_compiles_to_one_graph_with_the_same_result() -> None:
    assert_compiled_gives_the_same(dict(COMPILED["mean+stats"]), torch.device("cpu"))


def test_autocast_does_not_lower_the_precision(device: torch.device) -> None:
    logits, labels, options = make_case("everything", 7, 507, device)
    expected = loss_and_gradient(cross_entropy, logits, labels, **options)
    with torch.autocast(device.type, torch.bfloat16):
        actual = loss_and_gradient(cross_entropy, logits, labels, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# What only a GPU can show.


# Powers of two, real ones and odd ones on both sides of what fits registers; more rows than programs.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        *((vocab_size, torch.bfloat16) for vocab_size in (8192, 32000, 32768, 32769, 50257, 128256, 262144)),
        *((vocab_size, torch.float32) for vocab_size in (32768, 32769, 128256)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("reduction", "name"), [("none", "plain"), ("mean", "plain"), ("sum", "everything")])
def test_real_vocabularies_match_plain_pytorch(reduction: str, name: str, vocab_size: int, dtype: torch.dtype) -> None:
    logits, labels, options = make_case(name, 301, vocab_size, torch.device("cuda"), dtype)
    upstream = torch.randn(301 if reduction == "none" else ())
    assert_matches_plain(logits, labels, upstream, reduction=reduction, **options)
    for with_gradient in (False, True):
        leaf = logits.clone().requires_grad_(with_gradient)
        _, stats = cross_entropy(leaf, labels, reduction=reduction, return_stats=True, **options)
        assert_stats_match_plain(stats, logits, labels, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "vocab_size"), [(17000, 131072), (70000, 32768)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_rows_past_two_to_the_31_elements_are_right(reduction: str, num_tokens: int, vocab_size: int) -> None:
    logits = torch.randn(num_tokens, vocab_size, dtype=torch.bfloat16, device="cuda")
    labels = torch.randint(vocab_size, (num_tokens,), device="cuda")
    rows = [0, 2**31 // vocab_size, num_tokens - 1]
    scale = 1024.0  # exact, unlike the mean's factor
    upstream = torch.tensor(scale).expand(num_tokens if reduction == "none" else ())
    options = {"label_smoothing": 0.1}
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels, upstream, reduction=reduction, **options)
    of_row = torch.tensor(scale if reduction == "none" else scale / num_tokens, dtype=torch.float64).expand(3)
    eager, truth = (
        loss_and_gradient(
            plain_cross_entropy, logits[rows].to(dtype), labels[rows], of_row, reduction="none", **options
        )
        for dtype in (torch.bfloat16, torch.float64)
    )
    if reduction == "none":
        assert_as_accurate("losses", loss[rows], eager[0], truth[0])
    assert_as_accurate("gradient", gradient[rows], eager[1], truth[1])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [32000, 50257, 128256])
def test_mean_over_many_tokens_is_as_accurate_as_plain_pytorchs(vocab_size: int) -> None:
    num_tokens = 20000
    logits = 4 * torch.randn(num_tokens, vocab_size, dtype=torch.bfloat16, device="cuda")
    labels = torch.randint(vocab_size, (num_tokens,), device="cuda")
    labels[3::4] = -100
    num_kept = (labels != -100).sum().double()
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels)
    with torch.no_grad():
        eager_loss = F.cross_entropy(logits.float(), labels)
        sums = [
            F.cross_entropy(some.double(), their_labels, reduction="sum")
            for some, their_labels in zip(logits.split(1000), labels.split(1000), strict=True)
        ]
    assert_as_accurate("loss", loss, eager_loss, torch.stack(sums).sum() / num_kept)
    rows = torch.arange(0, num_tokens, 101, device="cuda")  # one token's gradient asks for no other token
    eager, truth = (
        loss_and_gradient(plain_cross_entropy, logits[rows].to(dtype), labels[rows], 1 / num_kept, reduction="sum")[1]
        for dtype in (torch.bfloat16, torch.float64)
    )
    assert_as_accurate("gradient", gradient[rows], eager, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("inplace_backward", [False, True], ids=["", "inplace_backward"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_replay_of_a_cuda_graph_computes_new_data(reduction: str, inplace_backward: bool) -> None:
    logits, labels = make_batch(64, 507, dtype=torch.bfloat16, device="cuda")
    static_logits, static_labels = logits.clone(), labels.clone()

    def step() -> tuple[Tensor, Tensor]:
        leaf = (1.0 * static_logits).requires_grad_()  # its own storage, which backward may overwrite
        loss = cross_entropy(leaf, static_labels, reduction=reduction, inplace_backward=inplace_backward)
        return loss, *torch.autograd.grad(loss.sum(), leaf)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(2):
        static_logits.copy_(4 * torch.randn_like(logits))
        static_labels.copy_(torch.randint(507, (64,)))
        static_labels[torch.randperm(64)[: torch.randint(50, ()).item()]] = -100
        graph.replay()
        torch.testing.assert_close(results, step(), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("return_stats", [False, True], ids=["", "stats"])
@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_host_never_waits_for_the_device(reduction: str, name: str, return_stats: bool) -> None:
    logits, labels, options = make_case(name, 64, 507, torch.device("cuda"), torch.bfloat16)
    logits.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = cross_entropy(logits, labels, reduction=reduction, return_stats=return_stats, **options)
        (result[0] if return_stats else result).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
