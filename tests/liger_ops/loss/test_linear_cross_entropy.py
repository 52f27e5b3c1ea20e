"""linear_cross_entropy against plain float64 PyTorch; test_chunked_loss tests its operations and memory."""

import importlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import TokenStats, cross_entropy, linear_cross_entropy
from liger_ops.loss.options import REDUCTIONS, TokenLossOptions
from tests.liger_ops.accuracy import assert_as_accurate
from tests.liger_ops.loss.cases import (
    DTYPES,
    OPTIONS,
    assert_stats_match_plain,
    make_options,
    plain_cross_entropy,
)

MODULE = importlib.import_module("liger_ops.loss.linear_cross_entropy")  # the package's attribute is the function
HIDDEN = 16
NAMES = ("input", "linear_weight", "linear_bias")
OUR_BUDGETS = ("max_valid_tokens", "saved_logits_bytes", "vocab_shard")  # options that change no result
WHOLE = 1000  # stands for as many rows as there are, in one chunk


def make_batch(
    num_tokens: int,
    vocab_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ignore_index: int = -100,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Hidden states, a head whose logits spread by about 2, its bias, and labels of which every fourth is ignored."""
    shapes = ((num_tokens, HIDDEN), (vocab_size, HIDDEN), (vocab_size,))
    tensors = tuple(torch.randn(shape).to(device, dtype) for shape in shapes)
    tensors[1].mul_(0.5)
    labels = torch.randint(vocab_size, (num_tokens,))
    labels[:1] = vocab_size - 1
    labels[2:3] = 0
    labels[3::4] = ignore_index
    return tensors, labels.to(device)


def plain_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, labels: Tensor, *, linear_bias: Tensor | None = None, **options: Any
) -> Tensor:
    return plain_cross_entropy(F.linear(input, linear_weight, linear_bias), labels, **options)


def loss_and_gradients(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor | None],
    labels: Tensor,
    upstream: Tensor | None = None,
    *,
    needed: tuple[bool, bool, bool] = (True, True, True),
    **options: Any,
) -> tuple[Tensor, ...]:
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_(need)
        for tensor, need in zip(tensors, needed, strict=True)
    ]
    loss = function(leaves[0], leaves[1], labels, linear_bias=leaves[2], **options)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return loss, *torch.autograd.grad(loss, wanted, None if upstream is None else upstream.to(loss))


def chunks_of(num_rows: int, tensors: Sequence[Tensor | None]) -> dict[str, Any]:
    """The option that makes chunks hold ``num_rows`` rows at most, or one chunk hold all of them if they are WHOLE."""
    if num_rows == WHOLE:
        return {"options": SimpleNamespace(batch_chunk_size=WHOLE)}
    return {"chunk_bytes": num_rows * tensors[1].shape[0] * tensors[1].element_size()}


def assert_matches_plain(
    tensors: Sequence[Tensor | None],
    labels: Tensor,
    upstream: Tensor | None = None,
    *,
    rows: int | None = 3,
    needed: tuple[bool, bool, bool] = (True, True, True),
    **options: Any,
) -> tuple[Tensor, ...]:
    """Returns the loss and the gradients for more assertions; ``rows`` are None for chunks by default."""
    in_double = [None if tensor is None else tensor.double() for tensor in tensors]
    run = {"upstream": upstream, "needed": needed}
    plain_options = {name: value for name, value in options.items() if name not in OUR_BUDGETS}
    truth = loss_and_gradients(plain_linear_cross_entropy, in_double, labels, **run, **plain_options)
    eager = loss_and_gradients(plain_linear_cross_entropy, tensors, labels, **run, **plain_options)
    chunks = {} if rows is None else chunks_of(rows, tensors)
    actual = loss_and_gradients(linear_cross_entropy, tensors, labels, **run, **chunks, **options)
    names = ["loss", *(name for name, need in zip(NAMES, needed, strict=True) if need)]
    assert [result.dtype for result in actual] == [torch.float32] + [tensors[0].dtype] * sum(needed)
    for name, *results in zip(names, actual, eager, truth, strict=True):
        assert_as_accurate(name, *results)
    return actual


# Every option meets every dtype in test_cross_entropy; here half precision meets the loop.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in OPTIONS] + list(itertools.product(["plain", "everything"], DTYPES[1:])),
    ids=str,
)
def test_loss_and_every_gradient_match_plain_pytorch(name: str, dtype: torch.dtype, device: torch.device) -> None:
    options = make_options(name, 4, 123, device)
    tensors, labels = make_batch(4, 123, dtype=dtype, device=device, ignore_index=options.get("ignore_index", -100))
    assert_matches_plain(tensors, labels, rows=2, **options)


@pytest.mark.parametrize("rows", [2, WHOLE], ids=["chunks", "whole"])
@pytest.mark.parametrize("reduction", ["none", "sum"])  # the mean meets every option above
def test_weights_scale_single_losses_and_their_sum(reduction: str, rows: int, device: torch.device) -> None:
    options = make_options("everything", 4, 50, device)
    tensors, labels = make_batch(4, 50, device=device, ignore_index=options["ignore_index"])
    upstream = torch.randn(4 if reduction == "none" else ())
    assert_matches_plain(tensors, labels, upstream, rows=rows, reduction=reduction, **options)


# Other sets of frozen tensors are in test_unaligned.py.
@pytest.mark.parametrize(
    ("rows", "frozen"),
    [(WHOLE, ()), (2, ()), (2, (0, 1, 2))],
    ids=["whole", "chunks", "chunks-frozen_head"],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_adapter_of_low_rank_is_part_of_the_head(
    reduction: str, rows: int, frozen: tuple[int, ...], device: torch.device
) -> None:
    options = make_options("everything", 6, 123, device) | {"reduction": reduction}
    tensors, labels = make_batch(6, 123, device=device, ignore_index=options["ignore_index"])
    tensors = [*tensors, torch.randn(6, 3, device=device), torch.randn(123, 3, device=device)]
    upstream = torch.randn(6 if reduction == "none" else (), device=device)

    def run(dtype: torch.dtype, function: Callable[..., Tensor], **more: Any) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_(index not in frozen) for index, x in enumerate(tensors)]
        loss = function(*leaves, **more)
        return [loss, *torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad], upstream.to(loss))]

    def plain(x: Tensor, weight: Tensor, bias: Tensor, low_rank: Tensor, low_rank_weight: Tensor) -> Tensor:
        return plain_cross_entropy(F.linear(x, weight, bias) + low_rank @ low_rank_weight.t(), labels, **options)

    def fused(x: Tensor, weight: Tensor, bias: Tensor, *adapter: Tensor, **more: Any) -> Tensor:
        return linear_cross_entropy(x, weight, labels, linear_bias=bias, adapter=adapter, **options, **more)

    actual = run(torch.float32, fused, **chunks_of(rows, tensors))
    for index, results in enumerate(zip(actual, run(torch.float32, plain), run(torch.float64, plain), strict=True)):
        assert_as_accurate(f"result {index}", *results)


# One token, fewer classes than tokens, an odd vocabulary of more than a thousand, a single chunk.
@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "rows", "reduction", "upstream"),
    [
        *(
            (*sizes, *upstream)
            for sizes in ((1, 507, WHOLE), (9, 2, 3), (3, 1025, 2))
            for upstream in (("none", "per_token"), ("sum", -2.5))
        ),
        (5, 57, WHOLE, "none", "expanded"),
        (5, 57, 2, "none", "expanded"),
        (5, 57, WHOLE, "mean", 1024.0),
        (5, 57, 2, "mean", 1024.0),
    ],
    ids=lambda value: "whole" if value == WHOLE else str(value),
)
def test_every_size_and_upstream_gradient_matches_plain_pytorch(
    num_tokens: int, vocab_size: int, rows: int, reduction: str, upstream: str | float, device: torch.device
) -> None:
    tensors, labels = make_batch(num_tokens, vocab_size, device=device)
    scale = 0.3 if upstream == "expanded" else upstream
    upstream = torch.randn(num_tokens) if upstream == "per_token" else torch.tensor(scale)
    upstream = upstream.expand(num_tokens) if reduction == "none" else upstream
    assert_matches_plain(tensors, labels, upstream, rows=rows, reduction=reduction, label_smoothing=0.1)


# Rows that are multiples of 16 bytes, and rows that are padded to them.
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(56, torch.float32), (57, torch.float32), (56, torch.bfloat16), (62, torch.bfloat16), (63, torch.float16)],
    ids=str,
)
def test_padded_rows_change_no_gradient(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    tensors, labels = make_batch(4, vocab_size, dtype=dtype, device=device)
    assert_matches_plain(tensors, labels, rows=2)


NEEDED = [needed for needed in itertools.product([True, False], repeat=3) if any(needed)]


@pytest.mark.parametrize("needed", NEEDED, ids=lambda needed: "+".join(itertools.compress(NAMES, needed)))
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_can_be_taken_alone(reduction: str, needed: tuple[bool, bool, bool], device: torch.device) -> None:
    tensors, labels = make_batch(2, 50, device=device)
    upstream = torch.ones(2) if reduction == "none" else None
    assert_matches_plain(tensors, labels, upstream, needed=needed, reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_works_without_a_bias(reduction: str, device: torch.device) -> None:
    tensors, labels = make_batch(4, 50, device=device)
    upstream = torch.ones(4) if reduction == "none" else None
    assert_matches_plain(
        (*tensors[:2], None), labels, upstream, rows=2, needed=(True, True, False), reduction=reduction
    )


def test_bias_of_minus_infinity_takes_classes_out(device: torch.device) -> None:
    tensors, labels = make_batch(4, 50, device=device)
    tensors[2][5:20] = -torch.inf
    labels[1] = 30
    assert_matches_plain(tensors, labels, rows=2)


@pytest.mark.parametrize(
    ("reduction", "dtype"),
    [("none", torch.bfloat16), ("mean", torch.float32), ("mean", torch.float16), ("sum", torch.bfloat16)],
    ids=str,
)
def test_second_backward_gives_the_same_and_inputs_are_left_unchanged(
    reduction: str, dtype: torch.dtype, device: torch.device
) -> None:
    tensors, labels = make_batch(7, 50, dtype=dtype, device=device)
    weights = {"weight": torch.rand(50, device=device), "token_weight": torch.rand(7, device=device)}
    upstream = torch.randn(7 if reduction == "none" else (), device=device)
    inputs = (*tensors, labels, upstream, *weights.values())
    before = [tensor.clone() for tensor in inputs]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    loss = linear_cross_entropy(
        leaves[0], leaves[1], labels, linear_bias=leaves[2], reduction=reduction, **weights, **chunks_of(3, tensors)
    )
    first, second = (torch.autograd.grad(loss, leaves, upstream, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    kept = [gradient.clone() for gradient in first]
    last = torch.autograd.grad(loss, leaves, 2 * upstream)  # may reuse what the graph held
    torch.testing.assert_close(last, tuple(2 * gradient for gradient in kept))
    assert all(torch.equal(now, then) for now, then in zip(first, kept, strict=True))
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1 / 3), (torch.float16, 2.0**16)], ids=str)
def test_upstream_gradient_is_not_rounded_to_the_dtype_of_the_head(
    dtype: torch.dtype, scale: float, device: str
) -> None:
    tensors, labels = make_batch(32, 50, dtype=dtype, device=device)
    options = {"reduction": "sum", "accumulate_dtype": dtype}
    (_, *stored), (_, *scaled) = (
        loss_and_gradients(linear_cross_entropy, tensors, labels, torch.tensor(upstream), **options)
        for upstream in (1.0, scale)
    )
    for before, after in zip(stored, scaled, strict=True):
        assert torch.equal(after, (before.float() * scale).to(dtype))


def test_loss_scale_keeps_the_mean_of_float16_from_underflow(device: torch.device) -> None:
    tensors, labels = make_batch(8, 50, dtype=torch.float16, device=device)
    input, weight, bias = tensors
    # Token 0 is certain and right, in logits without rounding: all it does is to make the mean's divisor large.
    input[0] = 100 * torch.eye(HIDDEN, device=device)[0]
    weight[:, 0] = -1
    weight[7, 0] = bias[7] = 0
    labels[0] = 7
    token_weight = torch.ones(8, device=device)
    token_weight[0] = 2.0**20
    assert_matches_plain(tensors, labels, torch.tensor(2.0**20), token_weight=token_weight)


@pytest.mark.parametrize("rows", [3, WHOLE], ids=["chunks", "whole"])
def test_layout_of_inputs_does_not_matter(rows: int, device: torch.device) -> None:
    (input, weight, bias), labels = make_batch(6, 50, device=device)
    token_weight = torch.rand(6, device=device)
    options = chunks_of(rows, (input, weight))
    expected = loss_and_gradients(
        linear_cross_entropy, (input, weight, bias), labels, token_weight=token_weight, **options
    )
    strided = (
        input.t().contiguous().t(),
        F.pad(weight, (3, 5))[:, 3:-5],
        bias.repeat_interleave(2)[::2],
    )
    assert not any(tensor.is_contiguous() for tensor in strided)
    actual = loss_and_gradients(
        linear_cross_entropy, strided, labels.repeat_interleave(2)[::2],
        token_weight=token_weight.repeat_interleave(2)[::2], **options,
    )  # fmt: skip
    torch.testing.assert_close(actual, expected)
    by_sequence = (input.view(2, 3, HIDDEN).transpose(0, 1), weight, bias)
    loss, grad_input, *_ = loss_and_gradients(
        linear_cross_entropy, by_sequence, labels.view(2, 3).t(), token_weight=token_weight.view(2, 3).t(), **options
    )
    torch.testing.assert_close((loss, grad_input.transpose(0, 1).reshape(6, -1)), expected[:2])
    same_for_all = input[:1].expand(6, -1)
    expected = loss_and_gradients(linear_cross_entropy, (same_for_all.contiguous(), weight, bias), labels, **options)
    actual = loss_and_gradients(linear_cross_entropy, (same_for_all, weight, bias), labels, **options)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("reduction", "with_gradient", "rows"),
    [
        pytest.param("none", False, 3, id="losses_in_chunks"),
        pytest.param("none", True, WHOLE, id="losses+gradient_whole"),
        pytest.param("mean", False, WHOLE, id="mean_whole"),
        pytest.param("mean", True, 3, id="mean+gradient_in_chunks"),
        pytest.param("sum", True, 3, id="sum+gradient_in_chunks"),
    ],
)
def test_stats_match_plain_pytorch_in_the_shape_of_the_labels(
    reduction: str, with_gradient: bool, rows: int, device: torch.device
) -> None:
    (input, weight, bias), labels = make_batch(8, 50, device=device)
    options = {"softcap": 3.0, "z_loss_weight": 0.1, "label_smoothing": 0.1, "token_weight": torch.rand(8).to(device)}
    shaped_options = {**options, "token_weight": options["token_weight"].view(2, 4)}
    leaf = input.clone().requires_grad_(with_gradient)
    loss, stats = linear_cross_entropy(
        leaf.view(2, 4, HIDDEN), weight, labels.view(2, 4), linear_bias=bias, reduction=reduction, return_stats=True,
        **shaped_options, **chunks_of(rows, (input, weight)),
    )  # fmt: skip
    assert isinstance(stats, TokenStats)
    assert all(stat.shape == (2, 4) for stat in stats)
    assert not any(stat.requires_grad for stat in stats)
    logits = F.linear(input, weight, bias)
    assert_stats_match_plain(TokenStats(*(stat.flatten() for stat in stats)), logits, labels, **options)
    expected = cross_entropy(logits, labels, reduction=reduction, **options)
    torch.testing.assert_close(loss.detach(), expected.view(loss.shape))
    assert loss.shape == ((2, 4) if reduction == "none" else ())
    assert loss.requires_grad == with_gradient


@pytest.mark.parametrize("num_tokens", [0, 6], ids=["no_tokens", "all_ignored"])
@pytest.mark.parametrize("rows", [3, WHOLE], ids=["chunks", "whole"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_kept_token_gives_no_gradient_and_the_mean_of_nothing_is_nan(
    reduction: str, rows: int, num_tokens: int, device: torch.device
) -> None:
    tensors, labels = make_batch(num_tokens, 50, device=device)
    labels.fill_(-100)
    upstream = torch.ones(num_tokens) if reduction == "none" else None
    loss, *gradients = loss_and_gradients(
        linear_cross_entropy, tensors, labels, upstream, reduction=reduction, **chunks_of(rows, tensors)
    )
    assert loss.isnan() if reduction == "mean" else not loss.any()
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert torch.equal(gradient, torch.zeros_like(tensor))


@pytest.mark.parametrize("which", ["token_weight", "weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_summed_weight_of_zero_gives_a_mean_of_nan_and_no_gradient(
    dtype: torch.dtype, which: str, device: torch.device
) -> None:
    tensors, labels = make_batch(4, 50, dtype=dtype, device=device)
    weight = {which: torch.zeros(4 if which == "token_weight" else 50, device=device)}
    loss, *gradients = loss_and_gradients(linear_cross_entropy, tensors, labels, **weight, **chunks_of(2, tensors))
    assert loss.isnan()
    assert not any(gradient.any() for gradient in gradients)


# A bound on the number of labels that count.


@pytest.mark.parametrize(
    ("reduction", "bound", "rows"),
    [
        pytest.param("mean", 6, 2, id="mean_exact"),
        pytest.param("mean", 7, 2, id="mean_larger"),
        pytest.param("mean", 8, 2, id="mean_num_tokens"),
        pytest.param("mean", 6, WHOLE, id="mean_whole"),
        pytest.param("sum", 100, 2, id="sum_more"),
        pytest.param("none", 6, 2, id="none_exact"),
        pytest.param("none", 100, 2, id="none_more"),
    ],
)
def test_bound_on_valid_tokens_changes_nothing(reduction: str, bound: int, rows: int, device: torch.device) -> None:
    tensors, labels = make_batch(8, 50, device=device)
    assert (labels >= 0).sum() == 6
    upstream = torch.linspace(-1, 2, 8) if reduction == "none" else None
    options = {"reduction": reduction, **chunks_of(rows, tensors)}
    expected = loss_and_gradients(linear_cross_entropy, tensors, labels, upstream, **options)
    actual = loss_and_gradients(linear_cross_entropy, tensors, labels, upstream, max_valid_tokens=bound, **options)
    torch.testing.assert_close(actual, expected)
    if reduction == "mean" and bound == 7:
        _, stats = linear_cross_entropy(
            *tensors[:2], labels, linear_bias=tensors[2], max_valid_tokens=bound, return_stats=True, **options
        )
        assert_stats_match_plain(stats, F.linear(*tensors), labels)


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_head_can_sum_in_float32(device: str) -> None:
    tensors, labels = make_batch(64, 50, dtype=torch.bfloat16, device=device)
    in_double = [tensor.double() for tensor in tensors]
    truth = loss_and_gradients(plain_linear_cross_entropy, in_double, labels, reduction="sum")[2]
    errors = {}
    for dtype in (torch.float32, torch.bfloat16, None):
        _, _, gradient, _ = loss_and_gradients(
            linear_cross_entropy, tensors, labels, reduction="sum", accumulate_dtype=dtype, **chunks_of(1, tensors)
        )
        assert gradient.dtype == torch.bfloat16
        errors[dtype] = (gradient.double() - truth).norm().item()
    assert errors[torch.float32] == errors[None] < errors[torch.bfloat16] / 2


# Calls.


def test_signature_is_pytorchs_with_more_keywords() -> None:
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("needs a PyTorch with torch.nn.functional.linear_cross_entropy")
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (linear_cross_entropy, F.linear_cross_entropy)
    )
    assert ours[: len(theirs)] == theirs


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


def test_options_reach_whole_logits_too(device: torch.device) -> None:
    input, weight = torch.randn(7, HIDDEN, device=device), torch.randn(11, 3, HIDDEN, device=device)
    target, token_weight = torch.randint(11, (7, 3)).to(device), torch.rand(7, 3).to(device)
    options = {"token_weight": token_weight, "softcap": 3.0, "z_loss_weight": 0.1, "logit_scale": 0.5}
    loss, stats = linear_cross_entropy(input, weight, target, return_stats=True, **options)
    logits = F.linear(input, weight.flatten(0, -2)).view(7, 11, 3).movedim(1, -1).reshape(21, 11)
    expected = plain_cross_entropy(logits, target.flatten(), **{**options, "token_weight": token_weight.flatten()})
    torch.testing.assert_close(loss, expected)
    assert all(stat.shape == (7, 3) for stat in stats)


# Errors.


def test_label_out_of_range_raises_on_the_cpu() -> None:
    tensors, labels = make_batch(7, 50)
    labels[1] = 50
    with pytest.raises(ValueError, match=r"target must be between 0 and .*49, or .*-100; got 50 \(1 of 7"):
        linear_cross_entropy(*tensors[:2], labels)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_label_out_of_range_gives_nan_in_its_row_alone_where_it_is_not_looked_at(
    reduction: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "check_labels", lambda *_: None)  # as on a GPU
    tensors, labels = make_batch(7, 50, device=device)
    upstream = torch.ones(7) if reduction == "none" else None
    _, expected, *_ = loss_and_gradients(linear_cross_entropy, tensors, labels, upstream, reduction=reduction)
    labels[1] = 50
    loss, *gradients = loss_and_gradients(linear_cross_entropy, tensors, labels, upstream, reduction=reduction)
    assert (loss[1] if reduction == "none" else loss).isnan()
    assert all(gradient.isnan().any() for gradient in gradients)
    others = [0, 2, 3, 4, 5, 6]
    torch.testing.assert_close(gradients[0][others], expected[others])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "average"}, "reduction must be one of .* got 'average'"),
        ({"label_smoothing": -0.5}, "label_smoothing must be .* of at least 0 .*, got -0.5"),
        ({"chunk_bytes": 0}, "chunk_bytes must be an integer of at least 1 or None, got 0"),
        ({"chunk_bytes": 0, "target": torch.ones(4, 11)}, "chunk_bytes must be an integer of at least 1 .*, got 0"),
        ({"max_valid_tokens": -1}, "max_valid_tokens must be an integer of at least 0 or None, got -1"),
        ({"linear_weight": torch.ones(3)}, r"linear_weight must be \[vocab_size, hidden_size\], got shape \(3,\)"),
        ({"linear_weight": torch.ones(11, 3).bfloat16()}, "linear_weight must have .* torch.float32, got torch.bfl"),
        ({"input": torch.ones(4, 5)}, r"input must end in .* = 3, got shape \(4, 5\)"),
        ({"input": torch.tensor(1.0)}, r"input must end in .* = 3, got shape \(\)"),
        ({"target": torch.zeros(5, dtype=torch.int64)}, r"target must .* \(4,\) tokens, target has shape \(5,\)"),
        ({"target": torch.zeros(4, dtype=torch.int32)}, "target must hold class indices .* got torch.int32"),
        ({"linear_bias": torch.ones(3)}, r"linear_bias must have shape \(11,\), got \(3,\)"),
        ({"weight": torch.ones(3)}, r"weight must have shape \(11,\), got \(3,\)"),
        ({"token_weight": torch.ones(3)}, r"token_weight must have target's shape \(4,\), got \(3,\)"),
        ({"input": torch.ones(2, 4, 3), "target": torch.ones(2, 4, 11)}, r"input must be .* got shape \(2, 4, 3\)"),
        ({"input": torch.ones(3), "linear_weight": torch.ones(11, 2, 3)}, r"input must be .* got shape \(3,\)"),
        ({"target": torch.ones(4, 11), "return_stats": True}, "target must be class indices .* return_stats"),
        ({"target": torch.ones(4, 11), "token_weight": torch.ones(4)}, "target must be class indices .* token_weight"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_raise(options: dict[str, Any], message: str) -> None:
    arguments = {
        "input": torch.ones(4, 3), "linear_weight": torch.ones(11, 3), "target": torch.zeros(4, dtype=torch.int64)
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**arguments, **options})


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_tensors_without_data_get_results_of_the_same_shape_and_dtype(reduction: str) -> None:
    (input, weight, bias), labels = make_batch(7, 50)
    expected, actual = (
        loss_and_gradients(
            linear_cross_entropy, [tensor.to(device) for tensor in (input, weight, bias)], labels.to(device),
            torch.ones(7 if reduction == "none" else (), device=device), reduction=reduction,
            **chunks_of(3, (input, weight)),
        )
        for device in ("cpu", "meta")
    )  # fmt: skip
    for on_cpu, on_meta in zip(expected, actual, strict=True):
        assert on_meta.is_meta
        assert (on_meta.shape, on_meta.dtype) == (on_cpu.shape, on_cpu.dtype)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_second_derivative_is_refused(reduction: str) -> None:
    tensors, labels = make_batch(7, 50)
    input, weight = (tensor.requires_grad_() for tensor in tensors[:2])
    loss = linear_cross_entropy(input, weight, labels, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, input, create_graph=True)


# The compiler.


@pytest.mark.parametrize(
    ("name", "reduction", "needs_gradient", "with_stats", "num_tokens", "max_valid_tokens"),
    [
        pytest.param("plain", "mean", [True, True, True], False, 7, None, id="mean"),
        pytest.param("everything", "mean", [True, True, True], True, 7, 6, id="mean+everything"),
        pytest.param("everything", "sum", [True, False, False], True, 7, None, id="sum+some_gradients"),
        pytest.param("everything", "none", [True, True, True], False, 7, 6, id="none"),
        pytest.param("plain", "none", [False, False, False], True, 7, None, id="none+stats"),
        pytest.param("everything", "mean", [True, True, True], True, 0, 0, id="no_tokens"),
    ],
)
@pytest.mark.parametrize("has_adapter", [False, True], ids=["", "adapter"])
def test_op_passes_opcheck(
    has_adapter: bool,
    name: str,
    reduction: str,
    needs_gradient: list[bool],
    with_stats: bool,
    num_tokens: int,
    max_valid_tokens: int | None,
    triton_device: torch.device,
) -> None:
    options = make_options(name, num_tokens, 50, triton_device)
    tensors, labels = make_batch(
        num_tokens, 50, dtype=torch.bfloat16, device=triton_device, ignore_index=options.get("ignore_index", -100)
    )
    weights = options.pop("weight", None), options.pop("token_weight", None)
    grad_losses = torch.randn(num_tokens, device=triton_device) if reduction == "none" and any(needs_gradient) else None
    adapter = [torch.randn(size, 2).to(tensors[0]) if has_adapter else None for size in (num_tokens, 50)]
    arguments = (
        *tensors, *adapter, labels, *weights, grad_losses, 3, False, torch.float32, max_valid_tokens,
        needs_gradient + [has_adapter and any(needs_gradient)] * 2, reduction, with_stats,
        *TokenLossOptions(**options).as_scalars(),
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.liger_ops.linear_cross_entropy.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def assert_compiled_gives_the_same(
    reduction: str, return_stats: bool, max_valid_tokens: int | None, device: torch.device
) -> None:
    tensors, labels = make_batch(7, 50, device=device)
    options = {
        "reduction": reduction, "softcap": 3.0, "label_smoothing": 0.1, "return_stats": return_stats,
        "max_valid_tokens": max_valid_tokens, "token_weight": torch.rand(7).to(device), "z_loss_weight": 0.1,
        "weight": torch.rand(50).to(device), **chunks_of(4, tensors),
    }  # fmt: skip
    upstream = torch.randn(7).to(device) if reduction == "none" else None
    torch._dynamo.reset()
    results = []
    for function in (linear_cross_entropy, torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        result = function(*leaves[:2], labels, linear_bias=leaves[2], **options)
        loss, stats = result if return_stats else (result, ())
        assert not any(stat.requires_grad for stat in stats)
        results.append((loss, *stats, *torch.autograd.grad(loss, leaves, upstream)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("reduction", "return_stats", "max_valid_tokens"), [("none", True, 6), ("mean", False, 6), ("mean", True, None)]
)
def test_compiles_to_one_graph_with_the_same_result(
    reduction: str, return_stats: bool, max_valid_tokens: int | None, triton_device: torch.device
) -> None:
    assert_compiled_gives_the_same(reduction, return_stats, max_valid_tokens, triton_device)


def test_compiles_to_one_graph_on_the_cpu_too() -> None:
    assert_compiled_gives_the_same("mean", True, None, torch.device("cpu"))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_autocast_computes_the_products_in_its_dtype_and_returns_the_inputs(
    reduction: str, device: torch.device
) -> None:
    tensors, labels = make_batch(7, 50, device=device)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    upstream = torch.randn(7) if reduction == "none" else None
    rounded = [tensor.bfloat16() for tensor in tensors]
    expected = loss_and_gradients(linear_cross_entropy, rounded, labels, upstream, **options)
    with torch.autocast(device.type, torch.bfloat16):
        actual = loss_and_gradients(linear_cross_entropy, tensors, labels, upstream, **options)
    assert all(result.dtype == torch.float32 for result in actual)
    torch.testing.assert_close(actual, tuple(result.float() for result in expected), rtol=0, atol=0)


# What only a GPU can show.


def test_autocast_leaves_float64_alone_as_a_linear_layer_does() -> None:
    tensors, labels = make_batch(5, 50, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        actual = loss_and_gradients(linear_cross_entropy, tensors, labels)
        truth = loss_and_gradients(plain_linear_cross_entropy, tensors, labels)
    torch.testing.assert_close(actual, truth)


@pytest.mark.gpu
def test_ignored_tokens_change_nothing_across_chunks_on_the_gpu() -> None:
    tensors, labels = make_batch(1000, 507, dtype=torch.bfloat16, device="cuda")
    labels[torch.randperm(1000)[:600]] = -100
    kept = labels != -100
    options = {"reduction": "sum", "accumulate_dtype": torch.float32, **chunks_of(128, tensors)}
    loss, grad_input, *grad_head = loss_and_gradients(linear_cross_entropy, tensors, labels, **options)
    expected_loss, expected_input, *expected_head = loss_and_gradients(
        linear_cross_entropy, (tensors[0][kept], *tensors[1:]), labels[kept], **options
    )
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(grad_input[kept], expected_input)
    torch.testing.assert_close(grad_head, expected_head)
    assert not grad_input[~kept].any()


# Both loss kernels, even and padded rows, a whole chunk and chunks of whole tiles.
@pytest.mark.gpu
@pytest.mark.parametrize(("vocab_size", "rows"), [(1000, WHOLE), (32000, 128), (50257, 128), (128256, 128)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_real_vocabularies_match_plain_pytorch(reduction: str, vocab_size: int, rows: int) -> None:
    tensors, labels = make_batch(300, vocab_size, dtype=torch.bfloat16, device="cuda")
    upstream = torch.randn(300) if reduction == "none" else None
    assert_matches_plain(tensors, labels, upstream, rows=rows, reduction=reduction)


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

    def error(function: Callable[..., Tensor], **options: Any) -> float:
        gradient = loss_and_gradients(function, tensors, labels, needed=needed, **options)[2]
        return ((gradient.double() - truth).norm() / truth.norm()).item()

    options = {"accumulate_dtype": accumulate_dtype, **chunks_of(num_tokens // num_chunks, tensors)}
    assert error(linear_cross_entropy, **options) <= factor * error(plain_linear_cross_entropy)


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

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(512)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(max_valid_tokens)
    for _ in range(3):
        fill()
        graph.replay()
        # A graph cannot count, so that without a bound it visits all tokens.
        torch.testing.assert_close(results, step(max_valid_tokens or 512))
        assert not results[0].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "max_valid_tokens"), [(WHOLE, None), (128, 200)], ids=["one_chunk", "max_valid_tokens"]
)
@pytest.mark.parametrize("return_stats", [False, True], ids=["", "stats"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_host_never_waits_for_the_device(
    reduction: str, return_stats: bool, rows: int, max_valid_tokens: int | None
) -> None:
    tensors, labels = make_batch(512, 507, dtype=torch.bfloat16, device="cuda")
    labels[torch.randperm(512)[:320]] = -100
    leaves = [tensor.requires_grad_() for tensor in tensors]
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = linear_cross_entropy(
            *leaves[:2], labels, linear_bias=leaves[2], reduction=reduction, return_stats=return_stats,
            max_valid_tokens=max_valid_tokens, **chunks_of(rows, tensors),
        )  # fmt: skip
        loss = result[0] if return_stats else result
        loss.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not loss.isnan().any()


def test_arguments_are_named_as_in_the_schema() -> None:
    schema = torch.ops.liger_ops.linear_cross_entropy.default._schema
    assert MODULE.LossArguments._fields == tuple(argument.name for argument in schema.arguments)
