"""linear_cross_entropy against plain float64 PyTorch; test_chunked_loss tests its operations and memory."""

import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops import TokenStats, linear_cross_entropy
from liger_ops.loss import chunked_loss
from liger_ops.loss.options import REDUCTIONS
from tests.liger_ops.accuracy import DTYPES, assert_as_accurate, few
from tests.liger_ops.loss.cases import (
    LOSS_OPTIONS,
    UPSTREAM,
    assert_stats_match_plain,
    capture,
    draw_labels,
    draw_upstream,
    draw_weights,
    has_mean,
    no_waits,
    plain_cross_entropy,
)
from tests.liger_ops.loss.head_cases import (
    HIDDEN,
    WHOLE,
    chunks_of,
    loss_and_gradients,
    make_batch,
    plain_linear_cross_entropy,
)


def draw_head(num_tokens: int, vocab_size: int, hidden: int, spread: float) -> list[Tensor]:
    """Hidden states, head, bias and the two factors of an adapter, whose products half precision holds exactly."""
    shapes = ((num_tokens, hidden), (vocab_size, hidden), (vocab_size,), (num_tokens, 2), (vocab_size, 2))
    tensors = [torch.randint(-2, 3, shape) / 2 for shape in shapes]
    tensors[1] *= spread
    return tensors


@given(
    draw=st.builds(
        SimpleNamespace,
        num_tokens=st.integers(1, 9),
        vocab_size=st.one_of(st.sampled_from([1, 2, 123, 507]), st.integers(3, 70)),
        hidden=st.sampled_from([5, 8]),
        spread=st.sampled_from([0.5, 1.0, 32.0]),  # usual and saturated
        dtype=st.sampled_from(DTYPES),
        reduction=st.sampled_from(REDUCTIONS),
        weights=st.sampled_from(["", "class", "token", "class and token"]),
        ignored=st.sampled_from(["none", "some"]),
        rows=st.sampled_from([1, 2, 3, 5, WHOLE]),
        saved=st.sampled_from([0, 3, 100]),
        bound=st.booleans(),
        is_adapted=st.booleans(),
        frozen=st.sets(st.integers(0, 4), max_size=3),
        is_padded=st.booleans(),
        options=LOSS_OPTIONS,
        upstream=UPSTREAM,
        seed=st.integers(0, 2**16),
    )
)
@few(40)
def test_loss_stats_and_gradients_are_as_accurate_as_plain_pytorchs(draw: Any, device: torch.device) -> None:
    spread, reduction, options = draw.spread, draw.reduction, draw.options
    torch.manual_seed(draw.seed)
    spread = min(spread, 1.0) if options["softcap"] else spread  # a saturated cap leaves no gradient
    drawn = draw_head(draw.num_tokens, draw.vocab_size, draw.hidden, spread)[: 5 if draw.is_adapted else 3]
    tensors = [tensor.to(device, draw.dtype) for tensor in drawn]
    labels = draw_labels(draw.num_tokens, draw.vocab_size, draw.ignored, options["ignore_index"]).to(device)
    options = options | draw_weights(draw.num_tokens, draw.vocab_size, draw.weights, device)
    kept = labels != options["ignore_index"]
    if reduction == "mean" and not has_mean(labels, options):
        reduction = "sum"
    needed = [index not in draw.frozen for index in range(len(tensors))]
    needed[0] |= not any(needed)
    run = {
        "upstream": draw_upstream((draw.num_tokens,) if reduction == "none" else (), draw.upstream, device),
        "needed": needed,
        "reduction": reduction,
        **options,
    }
    in_double = [tensor.double() for tensor in tensors]
    eager, truth = (
        loss_and_gradients(plain_linear_cross_entropy, some, labels, **run) for some in (tensors, in_double)
    )
    before = [tensor.clone() for tensor in tensors]
    found_stats: list[TokenStats] = []

    def fused(*args: Any, **kwargs: Any) -> Tensor:
        loss, stats = linear_cross_entropy(*args, return_stats=True, **kwargs)
        found_stats.append(TokenStats(*(stat.clone() for stat in stats)))
        stats.lse.zero_()  # belongs to the caller
        return loss

    with pytest.MonkeyPatch.context() as patch:
        if draw.is_padded:  # as on a GPU, where sizes that no 16 bytes divide are multiplied in parts and with padding
            patch.setattr(chunked_loss, "_product_multiple", lambda like: 8)
            patch.setattr(chunked_loss, "_COLUMN_MULTIPLE", 16)
        actual = loss_and_gradients(
            fused, tensors, labels, **run, **chunks_of(draw.rows, tensors),
            saved_logits_bytes=draw.saved * draw.vocab_size * 4,
            max_valid_tokens=int(kept.sum()) if draw.bound else None,
        )  # fmt: skip
    logits = F.linear(*tensors[:3]) + (F.linear(*tensors[3:]) if draw.is_adapted else 0.0)
    magnitude = 1.0 + logits.abs().amax().item()
    assert actual[0].dtype == torch.float32
    assert_as_accurate("loss", actual[0], eager[0], truth[0], magnitude=magnitude)
    # Probabilities less 1, rounded at its size in float32, times the other factor of a product; then sums of few.
    factors = (max(1.0, *(tensor.abs().amax().item() for tensor in tensors)), run["upstream"].abs().amax().item(), 3.0)
    difference_scale = math.prod(factors) * torch.finfo(torch.float32).eps / torch.finfo(draw.dtype).eps
    for number, values in enumerate(zip(actual[1:], eager[1:], truth[1:], strict=True)):
        assert values[0].dtype == draw.dtype
        assert values[0].is_contiguous()
        magnitude = max(4 * values[2].abs().amax().item(), difference_scale)
        assert_as_accurate(f"gradient {number}", *values, magnitude=magnitude)
    if draw.hidden == 8 or not draw.is_padded:
        assert_stats_match_plain(found_stats[0], logits, labels, **options)
    assert all(map(torch.equal, tensors, before))


def test_loss_scale_keeps_the_mean_of_float16_from_underflow(device: torch.device) -> None:
    tensors, labels = make_batch(8, 50, dtype=torch.float16, device=device)
    input, weight, bias = tensors
    # Token 0 is certain and right, in logits without rounding: all it does is to make the mean's divisor large.
    input[0] = 100 * torch.eye(HIDDEN, device=device)[0]
    weight[:, 0] = -1
    weight[7, 0] = bias[7] = 0
    labels[0] = 7
    run = {"upstream": torch.tensor(2.0**20), "token_weight": torch.ones(8, device=device)}
    run["token_weight"][0] = 2.0**20
    eager, truth = (
        loss_and_gradients(plain_linear_cross_entropy, some, labels, **run)
        for some in (tensors, [tensor.double() for tensor in tensors])
    )
    actual = loss_and_gradients(linear_cross_entropy, tensors, labels, **run, **chunks_of(3, tensors))
    for number, values in enumerate(zip(actual, eager, truth, strict=True)):
        assert_as_accurate(f"result {number}", *values)


@pytest.mark.parametrize(
    ("reduction", "bound", "with_gradient"),
    [("none", 0, True), ("none", 3, False), ("mean", 3, False), ("mean", 5, True), ("sum", 5, True)],
)
def test_bound_on_valid_tokens_that_is_too_small_gives_a_loss_of_nan(
    reduction: str, bound: int, with_gradient: bool, device: torch.device
) -> None:
    tensors, labels = make_batch(8, 50, device=device)  # six of which count, two at a time
    leaf = tensors[0].clone().requires_grad_(with_gradient)
    expected = linear_cross_entropy(*tensors[:2], labels, reduction="none")
    loss, stats = linear_cross_entropy(
        leaf, tensors[1], labels, reduction=reduction, max_valid_tokens=bound, return_stats=True,
        **chunks_of(2, tensors),
    )  # fmt: skip
    seen = max(2, bound)  # the first chunk is there whatever the bound
    left_out = (labels >= 0).nonzero()[seen:, 0]
    expected[left_out] = torch.nan
    torch.testing.assert_close(stats.losses, expected, equal_nan=True)
    if reduction == "none":
        torch.testing.assert_close(loss.detach(), expected, equal_nan=True)
    else:
        assert loss.isnan()


# Calls.


CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "no_batch": ((HIDDEN,), (11, HIDDEN), (), {}),
    "ignore_index=None": ((7, HIDDEN), (11, HIDDEN), (7,), {"ignore_index": None, "reduction": "sum"}),
    "class_probabilities": ((7, HIDDEN), (11, HIDDEN), (7, 11), {"label_smoothing": 0.1}),
    "head_of_three_dimensions": ((7, HIDDEN), (11, 3, HIDDEN), (7, 3), {"reduction": "none"}),
    "head_of_four_dimensions": ((7, HIDDEN), (11, 3, 2, HIDDEN), (7, 3, 2), {}),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_pytorchs_function_give_the_same(call: str, device: torch.device) -> None:
    input_shape, weight_shape, target_shape, options = CALLS[call]
    tensors = [torch.randn(shape, device=device) for shape in (input_shape, weight_shape, weight_shape[:-1])]
    is_probability = call == "class_probabilities"
    target = torch.rand(target_shape).softmax(-1) if is_probability else torch.randint(11, target_shape)

    def expected_function(
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor,
        ignore_index: int | None = -100,
        **options: Any,
    ) -> Tensor:
        if hasattr(F, "linear_cross_entropy"):
            return F.linear_cross_entropy(input, linear_weight, target, linear_bias=linear_bias, **options)
        logits = F.linear(input, linear_weight.flatten(0, -2), linear_bias.flatten())
        return F.cross_entropy(logits.unflatten(-1, linear_weight.shape[:-1]), target, **options)

    target = target.to(device)
    upstream = torch.randn(target_shape, device=device) if options.get("reduction") == "none" else None
    expected = loss_and_gradients(expected_function, tensors, target, upstream, **options)
    torch.testing.assert_close(loss_and_gradients(linear_cross_entropy, tensors, target, upstream, **options), expected)
    if hasattr(F, "linear_cross_entropy"):
        ours, theirs = (
            [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
            for function in (linear_cross_entropy, F.linear_cross_entropy)
        )
        assert ours[: len(theirs)] == theirs


def test_options_reach_whole_logits_too(device: torch.device) -> None:
    input, weight = torch.randn(7, HIDDEN, device=device), torch.randn(11, 3, HIDDEN, device=device)
    target, token_weight = torch.randint(11, (7, 3)).to(device), torch.rand(7, 3).to(device)
    options = {"token_weight": token_weight, "softcap": 3.0, "z_loss_weight": 0.1, "logit_scale": 0.5}
    loss, stats = linear_cross_entropy(input, weight, target, return_stats=True, **options)
    logits = F.linear(input, weight.flatten(0, -2)).view(7, 11, 3).movedim(1, -1).reshape(21, 11)
    expected = plain_cross_entropy(logits, target.flatten(), **{**options, "token_weight": token_weight.flatten()})
    torch.testing.assert_close(loss, expected)
    assert all(stat.shape == (7, 3) for stat in stats)


def test_autocast_leaves_float64_alone_as_a_linear_layer_does() -> None:
    tensors, labels = make_batch(5, 50, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        actual = loss_and_gradients(linear_cross_entropy, tensors, labels)
        truth = loss_and_gradients(plain_linear_cross_entropy, tensors, labels)
    torch.testing.assert_close(actual, truth)


# What only a GPU can show.


# Both loss kernels, even and padded rows, a whole chunk and chunks of whole tiles.
@pytest.mark.gpu
@pytest.mark.parametrize(("vocab_size", "rows"), [(1000, WHOLE), (32000, 128), (50257, 128), (128256, 128)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_real_vocabularies_match_plain_pytorch(reduction: str, vocab_size: int, rows: int) -> None:
    tensors, labels = make_batch(300, vocab_size, dtype=torch.bfloat16, device="cuda")
    run = {"upstream": torch.randn(300) if reduction == "none" else None, "reduction": reduction}
    eager, truth = (
        loss_and_gradients(plain_linear_cross_entropy, some, labels, **run)
        for some in (tensors, [tensor.double() for tensor in tensors])
    )
    actual = loss_and_gradients(linear_cross_entropy, tensors, labels, **run, **chunks_of(rows, tensors))
    for number, values in enumerate(zip(actual, eager, truth, strict=True)):
        assert_as_accurate(f"result {number}", *values)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_chunks", "accumulate_dtype", "factor"), [(4, None, 1.6), (4, torch.float32, 1.1), (40, None, 1.1)]
)
def test_gradient_of_the_head_over_chunks_is_about_as_accurate_as_plain_pytorchs(
    num_chunks: int, accumulate_dtype: torch.dtype | None, factor: float
) -> None:
    num_tokens, hidden_size, vocab_size = 5120, 512, 32000
    hidden_states = torch.randn(num_tokens, hidden_size, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocab_size, hidden_size, device="cuda").mul(hidden_size**-0.5).bfloat16()
    labels = torch.randint(vocab_size, (num_tokens,), device="cuda")
    tensors, needed = (hidden_states, weight, None), (True, True, False)
    in_double = (hidden_states.double(), weight.double(), None)
    truth = loss_and_gradients(plain_linear_cross_entropy, in_double, labels, needed=needed)[2]

    def error(function: Any, **options: Any) -> float:
        gradient = loss_and_gradients(function, tensors, labels, needed=needed, **options)[2]
        return ((gradient.double() - truth).norm() / truth.norm()).item()

    options = {"accumulate_dtype": accumulate_dtype, **chunks_of(num_tokens // num_chunks, tensors)}
    assert error(linear_cross_entropy, **options) <= factor * error(plain_linear_cross_entropy)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1031, 1032, 50257])
def test_input_gradients_of_many_tokens_add_up_as_accurately_as_eager_ones(vocab_size: int) -> None:
    """Rounding errors that are alike in all tokens show in their sum, as in the gradient of an earlier layer."""
    torch.manual_seed(0)
    x = torch.randn(1028, 128, device="cuda", dtype=torch.bfloat16)
    weight = 0.02 * torch.randn(vocab_size, 128, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(vocab_size, (1028,), device="cuda")

    def summed(function: Any, dtype: torch.dtype) -> Tensor:
        tensors, needed = (x.to(dtype), weight.to(dtype), None), (True, False, False)
        return loss_and_gradients(function, tensors, target, needed=needed)[1].double().sum(0)

    truth = summed(plain_linear_cross_entropy, torch.float64)
    our_error, eager_error = (
        (summed(function, torch.bfloat16) - truth).norm() / truth.norm()
        for function in (linear_cross_entropy, plain_linear_cross_entropy)
    )
    assert our_error <= 1.5 * eager_error + 1e-3, (our_error, eager_error)


@pytest.mark.gpu
@pytest.mark.parametrize("max_valid_tokens", [None, 256], ids=["", "max_valid_tokens"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_replay_of_a_cuda_graph_computes_new_data(reduction: str, max_valid_tokens: int | None) -> None:
    tensors, labels = make_batch(512, 507, dtype=torch.bfloat16, device="cuda")

    def fill() -> None:
        tensors[0].normal_()
        labels.copy_(torch.randint(507, (512,)))
        labels[torch.randperm(512)[: torch.randint(256, 500, ()).item()]] = -100  # at most 256 are left

    def step(max_valid_tokens: int | None) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        loss = linear_cross_entropy(
            *leaves[:2], labels, linear_bias=leaves[2], reduction=reduction, max_valid_tokens=max_valid_tokens,
            **chunks_of(128, tensors),
        )  # fmt: skip
        return loss, *torch.autograd.grad(loss.sum(), leaves)

    replay = capture(lambda: step(max_valid_tokens), lambda: step(512))
    for _ in range(3):
        fill()
        results = replay()
        # A graph cannot count, so that without a bound it visits all tokens.
        torch.testing.assert_close(results, step(max_valid_tokens or 512))
        assert not results[0].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "max_valid_tokens"), [(WHOLE, None), (128, 200)], ids=["one_chunk", "max_valid_tokens"]
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_host_never_waits_for_the_device(reduction: str, rows: int, max_valid_tokens: int | None) -> None:
    tensors, labels = make_batch(512, 507, dtype=torch.bfloat16, device="cuda")
    labels[torch.randperm(512)[:320]] = -100
    leaves = [tensor.requires_grad_() for tensor in tensors]
    with no_waits():
        loss, _ = linear_cross_entropy(
            *leaves[:2], labels, linear_bias=leaves[2], reduction=reduction, return_stats=True,
            max_valid_tokens=max_valid_tokens, **chunks_of(rows, tensors),
        )  # fmt: skip
        loss.sum().backward()
    assert not loss.isnan().any()
