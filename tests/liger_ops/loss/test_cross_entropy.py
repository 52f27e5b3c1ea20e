"""cross_entropy against plain float64 PyTorch, on the Triton kernels and on the PyTorch reference.

Both ways of the kernels, and their block borders, are in test_row_kernels; properties of all ops in test_ops.
"""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import liger_ops.loss.cross_entropy  # noqa: F401  # the package's attribute of that name is the function
from liger_ops import TokenStats, backend, cross_entropy
from liger_ops.loss.options import REDUCTIONS
from tests.liger_ops.accuracy import DTYPES, LAYOUTS, assert_as_accurate, few, lay_out
from tests.liger_ops.loss.cases import (
    LOSS_OPTIONS,
    UPSTREAM,
    assert_matches_plain,
    assert_stats_match_plain,
    draw_labels,
    draw_upstream,
    draw_weights,
    has_mean,
    loss_and_gradient,
    make_batch,
    make_case,
    no_waits,
    plain_cross_entropy,
)

MODULE = sys.modules["liger_ops.loss.cross_entropy"]


@given(
    draw=st.builds(
        SimpleNamespace,
        num_tokens=st.integers(1, 6),
        vocab_size=st.one_of(st.sampled_from([1, 2, 123, 507, 1024]), st.integers(3, 40)),
        spread=st.sampled_from([0.1, 4.0, 4.0, 300.0]),  # uniform, usual, saturated
        offset=st.sampled_from([0.0, 0.0, 1e4]),
        dtype=st.sampled_from(DTYPES),
        reduction=st.sampled_from(REDUCTIONS),
        weights=st.sampled_from(["", "class", "token", "class and token"]),
        ignored=st.sampled_from(["none", "some"]),
        layout=st.sampled_from(LAYOUTS),
        options=LOSS_OPTIONS,
        upstream=UPSTREAM,
        inplace_backward=st.booleans(),
        seed=st.integers(0, 2**16),
    )
)
@few(40)
def test_loss_stats_and_gradient_are_as_accurate_as_plain_pytorchs(draw: Any, device: torch.device) -> None:
    spread, reduction, options = draw.spread, draw.reduction, draw.options
    torch.manual_seed(draw.seed)
    offset = draw.offset if draw.dtype == torch.float32 else 0.0  # which half precision does not hold
    if options["softcap"]:  # a saturated cap leaves no gradient
        spread, offset = min(spread, 4.0), 0.0
    drawn = offset + spread * torch.randn(draw.num_tokens, draw.vocab_size)
    logits = lay_out(drawn.to(device, draw.dtype), draw.layout)
    labels = draw_labels(draw.num_tokens, draw.vocab_size, draw.ignored, options["ignore_index"]).to(device)
    options = options | draw_weights(draw.num_tokens, draw.vocab_size, draw.weights, device)
    grad = draw_upstream((draw.num_tokens,) if reduction == "none" else (), draw.upstream, device)
    if reduction == "mean" and not has_mean(labels, options):
        reduction = "sum"
    # A loss is a difference of lse and logits, or of sums over all classes.
    magnitude = 1.0 + logits.abs().amax().item()
    leaf_options = options | {"reduction": reduction}
    eager, truth = (
        loss_and_gradient(plain_cross_entropy, some, labels, grad, **leaf_options) for some in (logits, logits.double())
    )
    before = logits.clone()
    leaf = logits.detach().requires_grad_()
    loss, stats = cross_entropy(leaf, labels, inplace_backward=draw.inplace_backward, return_stats=True, **leaf_options)
    assert_as_accurate("loss", loss, eager[0], truth[0], magnitude=magnitude)
    assert_stats_match_plain(stats, before, labels, **options)
    assert torch.equal(logits, before)
    gradients = [torch.autograd.grad(loss, leaf, grad.to(loss), retain_graph=not draw.inplace_backward)[0]]
    if not draw.inplace_backward:
        gradients = [gradients[0], gradients[0].clone(), torch.autograd.grad(loss, leaf, 2 * grad.to(loss))[0] / 2]
        assert torch.equal(gradients[0], gradients[1])  # also once another backward had its memory
        assert torch.equal(logits, before)
    assert gradients[0].dtype == draw.dtype
    # Probabilities less what labels and smoothing ask for, each rounded at its size in float32, times weights up to 3.
    difference_scale = 3 * grad.abs().max().item() * torch.finfo(torch.float32).eps / torch.finfo(draw.dtype).eps
    for gradient in gradients:
        assert_as_accurate("gradient", gradient, eager[1], truth[1], magnitude=difference_scale)
    shares_rows = draw.layout == "expanded" and draw.num_tokens > 1
    if draw.inplace_backward and backend.use_triton(logits) and logits.stride(-1) == 1 and not shares_rows:
        assert gradients[0].data_ptr() == logits.data_ptr()


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


# Weights.


def test_weights_of_other_dtypes_and_layouts_and_of_ignored_tokens_give_the_same(device: torch.device) -> None:
    logits, labels = make_batch(8, 123, device=device)
    logits, labels = logits.view(2, 4, 123).movedim(-1, 1), labels.view(2, 4)
    token_weight = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 1.0], [1.0, 0.0]], device=device).t()
    weight = torch.rand(123, device=device)
    expected = loss_and_gradient(cross_entropy, logits, labels, weight=weight, token_weight=token_weight.contiguous())
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        others = {"weight": weight.double(), "token_weight": token_weight.to(dtype)}
        torch.testing.assert_close(loss_and_gradient(cross_entropy, logits, labels, **others), expected)
    ignored_rows = token_weight.where(labels >= 0, 100.0)
    actual = loss_and_gradient(cross_entropy, logits, labels, weight=weight, token_weight=ignored_rows)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("which", ["token_weight", "weight"])
def test_summed_weight_of_zero_gives_a_mean_of_nan_and_no_gradient(
    which: str, dtype: torch.dtype, device: torch.device
) -> None:
    logits, labels = make_batch(4, 123, dtype=dtype, device=device)
    loss, gradient = loss_and_gradient(
        cross_entropy, logits, labels, **{which: torch.zeros(123 if which == "weight" else 4, device=device)}
    )
    assert loss.isnan()
    assert not gradient.any()


# Backward in place.


@pytest.mark.parametrize("rows", [slice(None), slice(-1)], ids=["same", "view"])
def test_inplace_backward_is_refused_while_another_function_needs_the_logits(
    rows: slice, triton_device: torch.device
) -> None:
    logits, labels = make_batch(5, 123, device=triton_device)
    logits = 2 * logits.requires_grad_()
    penalty = logits.square().mean()
    loss = cross_entropy(logits[rows], labels[rows], inplace_backward=True) + penalty
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Calls.


@pytest.mark.parametrize(
    ("shape", "arguments", "options"),
    [
        pytest.param((7, 11), ("weight", None, 3, None, "sum", 0.1), {}, id="all_positional"),
        pytest.param((7, 11), ("weight",), {"label_smoothing": 0.2}, id="weighted_mean"),
        pytest.param((7, 11), (), {"size_average": False}, id="size_average=False"),
        pytest.param((7, 11), (None, False, -100, False), {}, id="reduce=False"),
        pytest.param((7, 11), (), {"reduce": True}, id="reduce=True"),
        pytest.param((7, 11), (), {"label_smoothing": 0.1, "reduction": "sum"}, id="probabilities"),
        pytest.param((11,), (), {}, id="no_batch"),
        pytest.param((2, 11, 5), ("weight",), {}, id="one_extra_dimension"),
        pytest.param((2, 11, 3, 2), (), {"reduction": "none", "label_smoothing": 0.2}, id="two_extra_dimensions"),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_calls_of_pytorchs_function_give_the_same(
    shape: tuple[int, ...], arguments: tuple, options: dict[str, Any], device: torch.device, request: Any
) -> None:
    logits = torch.randn(shape, device=device)
    labels = torch.randint(11, shape[:1] + shape[2:] if len(shape) > 1 else (), device=device)
    if "probabilities" in request.node.callspec.id:
        labels = torch.randn(shape, device=device).softmax(-1)
    arguments = tuple(torch.rand(11, device=device) if argument == "weight" else argument for argument in arguments)
    results = []
    for function in (cross_entropy, F.cross_entropy):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, labels, *arguments, **options)
        results.append((loss, *torch.autograd.grad(loss.sin().sum(), leaf)))
    torch.testing.assert_close(*results)
    ours, theirs = (
        [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (cross_entropy, F.cross_entropy)
    )
    assert ours[: len(theirs)] == theirs


# Statistics.


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_stats_have_the_targets_shape_and_neutral_values_at_ignored_tokens(
    reduction: str, device: torch.device
) -> None:
    logits, labels = make_batch(8, 123, device=device, ignore_index=5)
    logits[3, 5] = 100.0  # predicted what is ignored
    logits[7, :] = torch.nan
    for needs_gradient in (False, True):
        shaped = logits.view(2, 4, 123).movedim(-1, 1).detach().requires_grad_(needs_gradient)
        loss, stats = cross_entropy(shaped, labels.view(2, 4), reduction=reduction, ignore_index=5, return_stats=True)
        assert loss.requires_grad == needs_gradient
        assert not any(stat.requires_grad for stat in stats)
        for field, stat in stats._asdict().items():
            assert stat.shape == (2, 4)
            assert (stat[:, 3] == (5 if field == "predictions" else 0)).all(), field
        flat = TokenStats(*(stat.flatten()[:7] for stat in stats))
        assert_stats_match_plain(flat, logits[:7], labels[:7], ignore_index=5)


# Errors; wrong arguments are in bad_inputs_ops.


@pytest.mark.parametrize(
    ("label", "weights", "smoothing", "reduction"),
    [(-1, "class", 0.2, "sum"), (123, "", 1.0, "none"), (2**40, "", 0.0, "none")],
)
def test_label_out_of_range_gives_nan_in_its_row_alone_where_it_is_not_looked_at(
    label: int, weights: str, smoothing: float, reduction: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "check_labels", lambda *_: None)  # as on a GPU
    logits, labels = make_batch(4, 123, device=device)
    options = {"label_smoothing": smoothing, "reduction": reduction, **draw_weights(4, 123, weights, device)}
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


# The compiler; other options are in test_ops.


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_compiled_backward_in_place_is_not_in_place(reduction: str, device: torch.device) -> None:
    logits, labels, options = make_case("everything", 4, 123, device)
    before, upstream = logits.clone(), torch.linspace(-1, 2, 4) if reduction == "none" else None
    options |= {"reduction": reduction, "inplace_backward": True}
    torch._dynamo.reset()
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    actual = loss_and_gradient(compiled, logits, labels, upstream, **options)
    assert torch.equal(logits, before)
    torch.testing.assert_close(actual, loss_and_gradient(cross_entropy, logits, labels, upstream, **options))


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
    row_scale = torch.tensor(scale if reduction == "none" else scale / num_tokens, dtype=torch.float64).expand(3)
    eager, truth = (
        loss_and_gradient(
            plain_cross_entropy, logits[rows].to(dtype), labels[rows], row_scale, reduction="none", **options
        )
        for dtype in (torch.bfloat16, torch.float64)
    )
    if reduction == "none":
        assert_as_accurate("losses", loss[rows], eager[0], truth[0])
    assert_as_accurate("gradient", gradient[rows], eager[1], truth[1])


@pytest.mark.gpu
@pytest.mark.parametrize("return_stats", [False, True], ids=["", "stats"])
@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_host_never_waits_for_the_device(reduction: str, name: str, return_stats: bool) -> None:
    logits, labels, options = make_case(name, 64, 507, torch.device("cuda"), torch.bfloat16)
    logits.requires_grad_()
    with no_waits():
        result = cross_entropy(logits, labels, reduction=reduction, return_stats=return_stats, **options)
        (result[0] if return_stats else result).sum().backward()
