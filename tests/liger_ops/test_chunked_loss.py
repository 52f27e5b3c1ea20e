"""The chunk loop with a loss that is no cross entropy: half the squared logits, whose gradient is the logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from liger_ops.chunked_loss import (
    DEFAULT_CHUNK_BYTES,
    KeptTokens,
    choose_accumulate_dtype,
    choose_chunk_size,
    chunked_linear_loss,
    default_chunk_bytes,
)

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
    tokens = sum(visited, [])
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
