"""The chunk loop: on its own, and what it computes and allocates for linear_cross_entropy.

On its own it runs with a loss that is no cross entropy: half the squared logits, whose gradient is the logits.
"""

import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from liger_ops import linear_cross_entropy
from liger_ops.chunked_loss import (
    DEFAULT_CHUNK_BYTES,
    KeptTokens,
    choose_accumulate_dtype,
    choose_chunk_size,
    chunked_linear_loss,
    default_chunk_bytes,
)
from tests.liger_ops.test_linear_cross_entropy import (
    HIDDEN,
    chunks_of,
    loss_and_gradients,
    make_batch,
    plain_linear_cross_entropy,
)

LINEAR_CROSS_ENTROPY = importlib.import_module("liger_ops.linear_cross_entropy")  # not the function of that name
IGNORED = -100
ALL_GRADIENTS = (True, True, True)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    num_tokens=st.integers(0, 200_000),
    vocab_size=st.integers(1, 300_000),
    element_size=st.sampled_from([2, 4, 8]),
    chunk_bytes=st.integers(1, 2**31),
)
def test_chunk_size_keeps_to_its_budget_and_never_holds_all_tokens(num_tokens, vocab_size, element_size, chunk_bytes):
    rows = choose_chunk_size(num_tokens, vocab_size, element_size, chunk_bytes)
    assert rows >= 1
    assert rows == 1 or rows * vocab_size * element_size <= chunk_bytes
    assert num_tokens < 2 or rows < num_tokens
    assert rows <= 128 or rows % 128 == 0


@pytest.mark.parametrize(
    ("num_tokens", "rows"),
    [(0, 1), (1, 1), (2, 1), (7, 4), (256, 128), (257, 256), (8192, 2048), (8193, 1664), (100_000, 2048)],
)
def test_chunk_size_spreads_tokens_evenly_over_the_fewest_chunks(num_tokens, rows):
    assert choose_chunk_size(num_tokens, 131072, 2, 512 * 2**20) == rows  # 2048 rows fit


def test_chunk_size_is_one_token_when_not_even_that_fits():
    assert choose_chunk_size(100, 131072, 2, 1) == 1


@pytest.mark.parametrize(
    ("weight_dtype", "num_chunks", "expected"),
    [
        (torch.bfloat16, 8, torch.bfloat16),
        (torch.bfloat16, 9, torch.float32),
        (torch.float16, 1, torch.float32),
        (torch.float32, 1, torch.float32),
        (torch.float64, 9, torch.float64),
    ],
    ids=str,
)
def test_accumulate_dtype_rounds_only_few_bfloat16_sums(weight_dtype, num_chunks, expected):
    assert choose_accumulate_dtype(weight_dtype, num_chunks) == expected


@pytest.mark.parametrize(("device", "like"), [("cuda", "cuda"), ("cpu", "cpu"), ("meta", "cpu")])
def test_default_budget_follows_the_device(device, like):
    assert default_chunk_bytes(torch.device(device)) == DEFAULT_CHUNK_BYTES[like]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("labels", "order", "count"),
    [
        ([5, IGNORED, 0, IGNORED, 7], [0, 2, 4, 1, 3], 3),
        ([IGNORED, IGNORED], [0, 1], 0),
        ([1, 2, 3], [0, 1, 2], 3),
        ([], [], 0),
    ],
    ids=["some", "none", "all", "no_tokens"],
)
def test_kept_tokens_come_first_in_their_order(labels, order, count, device):
    tokens = KeptTokens.of(torch.tensor(labels, dtype=torch.int64, device=device), IGNORED)
    assert tokens.order.tolist() == order
    assert tokens.count() == count


def run_half_squares(labels, *, chunk_size, bias=True, accumulate_dtype=torch.float64, needs_gradient=ALL_GRADIENTS):
    """Runs the loop; returns its inputs, its gradients, and the tokens of every chunk."""
    generator = torch.Generator().manual_seed(0)
    hidden_states, weight, bias_value = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((len(labels), 3), (5, 3), (5,))
    )
    bias_value = bias_value if bias else None
    visited = []

    def chunk_loss(logits, index):
        visited.append(index.tolist())
        torch.testing.assert_close(logits, torch.nn.functional.linear(hidden_states[index], weight, bias_value))
        logits[labels[index] == IGNORED] = 0.0

    gradients = chunked_linear_loss(
        hidden_states, weight, bias_value, KeptTokens.of(labels, IGNORED), chunk_loss,
        chunk_size=chunk_size, accumulate_dtype=accumulate_dtype, needs_gradient=needs_gradient,
    )  # fmt: skip
    return (hidden_states, weight, bias_value), gradients, visited


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 7, 11, 50])
def test_gradients_do_not_depend_on_the_chunks(chunk_size, bias):
    labels = torch.tensor([0, IGNORED, 0, 0, IGNORED, 0, 0, IGNORED, 0, 0, 0])
    needs_gradient = (True, True, bias)
    inputs, gradients, _ = run_half_squares(labels, chunk_size=chunk_size, bias=bias, needs_gradient=needs_gradient)
    leaves = [tensor.requires_grad_() for tensor in inputs if tensor is not None]
    logits = torch.nn.functional.linear(leaves[0], leaves[1], leaves[2] if bias else None)
    expected = torch.autograd.grad(logits[labels != IGNORED].square().sum() / 2, leaves)
    torch.testing.assert_close(tuple(gradients)[: len(leaves)], expected)


@pytest.mark.parametrize(
    ("num_kept", "chunk_size", "sizes"),
    [
        (8, 3, [3, 3, 2]),
        (6, 3, [3, 3]),
        (1, 3, [3]),  # the first chunk is filled before the count is known
        (0, 3, [3]),
        (10, 3, [3, 3, 3, 1]),
        (5, 20, [10]),
    ],
)
def test_ignored_tokens_past_the_first_chunk_are_never_projected(num_kept, chunk_size, sizes):
    labels = torch.full((10,), IGNORED)
    labels[-num_kept or 10 :] = 0
    _, gradients, visited = run_half_squares(labels, chunk_size=chunk_size)
    assert [len(tokens) for tokens in visited] == sizes
    tokens = list(itertools.chain.from_iterable(visited))
    assert len(set(tokens)) == len(tokens)
    kept = (labels != IGNORED).nonzero()[:, 0].tolist()
    assert tokens[:num_kept] == kept
    assert not gradients.hidden_states[labels == IGNORED].any()


@pytest.mark.parametrize(
    "needs_gradient",
    [(False, False, False), (True, False, False), (False, True, False), (False, False, True)],
    ids=["none", "hidden_states", "weight", "bias"],
)
def test_gradients_not_asked_for_are_empty(needs_gradient):
    _, expected, _ = run_half_squares(torch.zeros(7, dtype=torch.int64), chunk_size=3)
    _, gradients, _ = run_half_squares(torch.zeros(7, dtype=torch.int64), chunk_size=3, needs_gradient=needs_gradient)
    for gradient, full, needed in zip(gradients, expected, needs_gradient, strict=True):
        assert torch.equal(gradient, full) if needed else gradient.numel() == 0


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_head_gradients_have_the_dtype_they_are_summed_in(num_tokens):
    labels = torch.zeros(num_tokens, dtype=torch.int64)
    _, gradients, visited = run_half_squares(labels, chunk_size=2, accumulate_dtype=torch.float32)
    assert [gradient.dtype for gradient in gradients] == [torch.float64, torch.float32, torch.float32]
    assert [gradient.shape for gradient in gradients] == [(num_tokens, 3), (5, 3), (5,)]
    assert bool(gradients.weight.any()) == (num_tokens > 0) == bool(visited)


class OperatorLog(TorchDispatchMode):
    """Writes down the operators, their largest output and what each matrix product saw, inside our op too."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.largest, self.products, self.operators = 0, [], set()

        def logged_loop(*args, **kwargs):
            with self:
                return chunked_linear_loss(*args, **kwargs)

        monkeypatch.setattr(LINEAR_CROSS_ENTROPY, "chunked_linear_loss", logged_loop)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operators.add(func.overloadpacket)
        outputs = result if isinstance(result, (tuple, list)) else [result]
        self.largest = max([self.largest, *(out.numel() for out in outputs if isinstance(out, torch.Tensor))])
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.matmul):
            self.products.append(tuple(args[0].shape))
        if func.overloadpacket is torch.ops.aten.addmm:
            self.products.append(tuple(args[1].shape))
        return result


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize(
    ("needed", "per_chunk"),
    [
        ((False, False, False), 1),
        ((False, False, True), 1),
        ((True, False, False), 2),
        ((False, True, False), 2),
        ((True, True, True), 3),
    ],
    ids=["no_gradient", "bias", "input", "weight", "all"],
)
def test_only_the_products_that_are_needed_are_computed(needed, per_chunk, reduction, monkeypatch):
    tensors, labels = make_batch(12, 50)
    labels.clamp_(min=0)
    log = OperatorLog(monkeypatch)
    upstream = torch.ones(12) if reduction == "none" else None
    with log:
        if any(needed):
            loss_and_gradients(
                linear_cross_entropy, tensors, labels, upstream, needed=needed, reduction=reduction,
                **chunks_of(4, tensors),
            )  # fmt: skip
        else:
            with torch.no_grad():
                leaves = [tensor.requires_grad_() for tensor in tensors]
                linear_cross_entropy(
                    leaves[0], leaves[1], labels, linear_bias=leaves[2], reduction=reduction, **chunks_of(4, tensors)
                )
    # Without reduction, backward repeats the projection that forward made for the losses.
    repeated = 1 if reduction == "none" and any(needed) else 0
    assert len(log.products) == 3 * (per_chunk + repeated)
    assert all(4 in shape for shape in log.products)
    assert (torch.ops.aten.scatter_add_ in log.operators) == any(needed)  # the labels' share of the gradient


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_no_tensor_of_the_size_of_the_logits_ever_exists(reduction, monkeypatch):
    tensors, labels = make_batch(64, 96)
    log = OperatorLog(monkeypatch)
    upstream = torch.ones(64) if reduction == "none" else None
    with log:
        loss_and_gradients(
            linear_cross_entropy, tensors, labels, upstream, reduction=reduction, label_smoothing=0.1, softcap=3.0,
            **chunks_of(8, tensors),
        )  # fmt: skip
    assert log.products
    assert log.largest == 96 * HIDDEN  # the head; a chunk has half of that, the logits four times it


@pytest.mark.parametrize("num_kept", [0, 3, 10])
def test_ignored_tokens_are_left_out_of_the_products(num_kept, monkeypatch):
    tensors, labels = make_batch(40, 50)
    labels.fill_(-100)
    labels[torch.randperm(40)[:num_kept]] = 7
    log = OperatorLog(monkeypatch)
    with log, torch.no_grad():
        linear_cross_entropy(*tensors[:2], labels, **chunks_of(4, tensors))
    assert sum(shape[0] for shape in log.products) == max(4, num_kept)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_chunk_size_never_changes_the_answer(reduction):
    tensors, labels = make_batch(37, 50, dtype=torch.float64)
    upstream = torch.randn(37) if reduction == "none" else None
    options = {"upstream": upstream, "reduction": reduction, "label_smoothing": 0.1, "z_loss_weight": 0.1}
    truth = loss_and_gradients(plain_linear_cross_entropy, tensors, labels, **options)
    for rows in (1, 2, 5, 18, 1000):
        actual = loss_and_gradients(linear_cross_entropy, tensors, labels, **options, **chunks_of(rows, tensors))
        torch.testing.assert_close(actual, truth)
    defaults = loss_and_gradients(linear_cross_entropy, tensors, labels, **options)
    torch.testing.assert_close(defaults, truth)


@pytest.mark.parametrize("acc_dtype", [None, torch.float32])
def test_pytorchs_options_are_followed(acc_dtype, monkeypatch):
    tensors, labels = make_batch(12, 50, dtype=torch.bfloat16)
    labels.clamp_(min=0)
    make_options = getattr(torch.nn, "LinearCrossEntropyOptions", SimpleNamespace)
    log = OperatorLog(monkeypatch)
    with log:
        actual = loss_and_gradients(
            linear_cross_entropy, tensors, labels,
            options=make_options(batch_chunk_size=4, chunking_method=None, acc_dtype=acc_dtype),
        )  # fmt: skip
    assert [shape[0] for shape in log.products] == [4, 4, 50] * 3
    rounded, exact = (
        loss_and_gradients(linear_cross_entropy, tensors, labels, accumulate_dtype=dtype, **chunks_of(4, tensors))
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert not torch.equal(rounded[2], exact[2])
    assert torch.equal(actual[2], rounded[2] if acc_dtype is None else exact[2])
