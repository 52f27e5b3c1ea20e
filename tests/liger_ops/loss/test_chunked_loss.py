"""The sizes of chunks, and the loop's operations and memory in linear_cross_entropy."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liger_ops import linear_cross_entropy
from liger_ops.loss import chunked_loss
from liger_ops.loss.chunked_loss import choose_accumulate_dtype, choose_chunk_size, default_chunk_size
from tests.liger_ops.accuracy import few
from tests.liger_ops.loss.head_cases import HIDDEN, WHOLE, chunks_of, loss_and_gradients, make_batch
from tests.liger_ops.operators import OperatorLog

IGNORED = -100

MIB = 2**20
CUDA = torch.device("cuda")

sizes = {
    "num_tokens": st.one_of(st.integers(0, 5000), st.integers(0, 1_000_000)),
    "vocab_size": st.one_of(st.integers(1, 300_000), st.sampled_from([32000, 128256, 262144])),
    "element_size": st.sampled_from([2, 4, 8]),
}


def rows_within(num_bytes: int, token_bytes: int) -> int:
    """How many tokens' logits fit, in whole tiles where there are several."""
    rows = num_bytes // token_bytes
    return max(1, rows - rows % (256 if rows > 512 else 16 if rows > 128 else 1))


@few(300)
@given(**sizes, chunk_bytes=st.integers(1, 2**31))
def test_chunk_size_keeps_to_its_budget_and_never_holds_all_tokens(
    num_tokens: int, vocab_size: int, element_size: int, chunk_bytes: int
) -> None:
    rows = choose_chunk_size(num_tokens, vocab_size, element_size, chunk_bytes)
    assert rows >= 1
    assert rows == 1 or rows * vocab_size * element_size <= chunk_bytes
    assert num_tokens < 2 or rows < num_tokens
    assert rows <= 128 or rows % 16 == 0
    assert rows <= 512 or rows % 256 == 0


@few(300)
@given(**sizes, hidden_size=st.sampled_from([0, 64, 896, 4096, 8192]))
def test_default_chunk_on_a_gpu_is_as_large_as_time_asks_and_as_small_as_memory_asks(
    num_tokens: int, vocab_size: int, element_size: int, hidden_size: int
) -> None:
    rows = default_chunk_size(num_tokens, vocab_size, element_size, CUDA, hidden_size)
    token_bytes, head = vocab_size * element_size, vocab_size * hidden_size * element_size
    most = max(2048 * MIB + head, 2 * head)
    assert 1 <= rows <= max(1, num_tokens)
    assert rows == 1 or rows * token_bytes <= most
    is_small = num_tokens * token_bytes <= max(4 * MIB, min(most, 2047 * token_bytes))
    assert (rows >= num_tokens) == (num_tokens < 2 or is_small)
    num_chunks, four = -(-num_tokens // rows), 4 * rows_within(most, token_bytes)
    assert num_chunks <= 4 or num_tokens > four - 4 * 256  # bfloat16 sums, which need no second copy of the head
    assert num_chunks <= max(2, -(-num_tokens // rows_within(2048 * MIB, token_bytes)), 4)
    gradients = (num_tokens + vocab_size) * hidden_size
    memory = rows * (vocab_size + hidden_size) + gradients
    saves_memory = memory <= 0.7 * (num_tokens * vocab_size + gradients)
    enough = min(1536 if saves_memory else 2048, rows_within(most, token_bytes))
    assert num_chunks > 4 or num_chunks <= max(2, -(-num_tokens // enough))


def test_accumulate_dtype_rounds_only_few_bfloat16_sums() -> None:
    for dtype in (torch.float16, torch.float32):
        assert choose_accumulate_dtype(dtype, 1) == torch.float32
    assert choose_accumulate_dtype(torch.float64, 9) == torch.float64
    assert [choose_accumulate_dtype(torch.bfloat16, num) for num in (4, 5)] == [torch.bfloat16, torch.float32]


@pytest.mark.multi_gpu
def test_tokens_of_another_gpu_than_the_current_one_are_counted() -> None:
    tensors, labels = make_batch(64, 50, device="cuda:1")
    expected = loss_and_gradients(linear_cross_entropy, tensors, labels, **chunks_of(8, tensors))
    with torch.cuda.device(1):
        torch.cuda._sleep(10**9)
    actual = loss_and_gradients(linear_cross_entropy, tensors, labels, **chunks_of(8, tensors))
    torch.testing.assert_close(actual, expected)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_columns", [1, 50, 64, 1027])
def test_rows_of_logits_are_aligned_and_their_padding_is_no_nan(num_columns: int, dtype: torch.dtype) -> None:
    rows = chunked_loss.aligned_rows(torch.empty(1, dtype=dtype), 3, num_columns)
    assert rows.shape == (3, num_columns)
    assert rows.data_ptr() % 16 == rows.stride(0) * dtype.itemsize % (16 if num_columns < 1024 else 128) == 0
    # Matrix products in half precision read the padding on some CPUs, where NaN would spread.
    assert rows._base is None or not rows._base[:, num_columns:].any()


# In linear_cross_entropy.


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_no_tensor_of_the_size_of_the_logits_ever_exists(reduction: str, log: OperatorLog) -> None:
    tensors, labels = make_batch(64, 96)
    upstream = torch.ones(64) if reduction == "none" else None
    with log:
        loss_and_gradients(
            linear_cross_entropy, tensors, labels, upstream, reduction=reduction, label_smoothing=0.1, softcap=3.0,
            **chunks_of(8, tensors),
        )  # fmt: skip
    assert log.products
    assert log.largest == 96 * HIDDEN  # the head; a chunk has half of that, the logits four times it


@pytest.mark.parametrize("max_valid_tokens", [None, 10, 17], ids=str)
@pytest.mark.parametrize("num_kept", [0, 3, 10])
def test_ignored_tokens_are_left_out_of_the_products(
    num_kept: int, max_valid_tokens: int | None, log: OperatorLog
) -> None:
    tensors, labels = make_batch(40, 50)
    labels.fill_(IGNORED)
    labels[torch.randperm(40)[:num_kept]] = 7
    with log, torch.no_grad():
        linear_cross_entropy(*tensors[:2], labels, max_valid_tokens=max_valid_tokens, **chunks_of(4, tensors))
    expected = max(4, num_kept) if max_valid_tokens is None else max_valid_tokens
    assert sum(shape[0] for shape in log.products) == expected


@pytest.mark.parametrize("num_kept", [0, 10])
def test_one_chunk_of_all_tokens_sorts_and_copies_none(num_kept: int, log: OperatorLog) -> None:
    tensors, labels = make_batch(12, 50)
    labels[num_kept:] = IGNORED
    with log:
        loss_and_gradients(linear_cross_entropy, tensors, labels, **chunks_of(WHOLE, tensors))
    assert [shape[0] for shape in log.products] == [12, 50, 12]  # the logits and the gradients of weight and input
    assert not log.operators & {torch.ops.aten.sort, torch.ops.aten.argsort, torch.ops.aten.index_select}


@pytest.mark.parametrize("acc_dtype", [None, torch.float32])
def test_pytorchs_options_are_followed(acc_dtype: torch.dtype | None, log: OperatorLog) -> None:
    tensors, labels = make_batch(12, 50, dtype=torch.bfloat16)
    labels.clamp_(min=0)
    make_options = getattr(torch.nn, "LinearCrossEntropyOptions", SimpleNamespace)
    with log:
        actual = loss_and_gradients(
            linear_cross_entropy, tensors, labels,
            options=make_options(batch_chunk_size=4, chunking_method=None, acc_dtype=acc_dtype),
        )  # fmt: skip
    assert [shape[0] for shape in log.products] == [4, 50, 4] * 3
    rounded, exact = (
        loss_and_gradients(linear_cross_entropy, tensors, labels, accumulate_dtype=dtype, **chunks_of(4, tensors))
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert not torch.equal(rounded[2], exact[2])
    assert torch.equal(actual[2], rounded[2] if acc_dtype is None else exact[2])


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize(
    ("saved_rows", "again"), [(None, [3, 3, 2]), (2, [3, 3, 2]), (3, [3, 2]), (7, [2]), (100, [])], ids=str
)
def test_saved_chunks_of_tokens_that_count_are_not_projected_again(
    saved_rows: int | None, again: list[int], reduction: str, log: OperatorLog
) -> None:
    tensors, labels = make_batch(10, 57)  # two are ignored
    budget = {} if saved_rows is None else {"saved_logits_bytes": saved_rows * 57 * 4}
    upstream = torch.linspace(-1, 2, 10) if reduction == "none" else None
    saved: list[tuple[int, ...]] = []
    with log, torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(tuple(x.shape)), x)[1], lambda x: x):
        loss_and_gradients(
            linear_cross_entropy, tensors, labels, upstream, reduction=reduction, **budget, **chunks_of(3, tensors)
        )
    projected = [rows for rows, inner, columns in log.products if (inner, columns) == (HIDDEN, 57)]
    assert projected == [3, 3, 2, *(again if reduction == "none" else [])]
    kept = [shape for shape in saved if shape[1:] == (57,)]
    assert kept == ([(3, 57), (3, 57), (2, 57)][: 3 - len(again)] if reduction == "none" else [])


def test_all_but_a_few_columns_are_multiplied_in_aligned_sizes(
    log: OperatorLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "_product_multiple", lambda like: 8)
    monkeypatch.setattr(chunked_loss, "_COLUMN_MULTIPLE", 16)
    tensors, labels = make_batch(16, 123, dtype=torch.bfloat16)
    labels.clamp_(min=0)
    leaves = [tensor.requires_grad_() for tensor in tensors[:2]]
    with log:
        loss = linear_cross_entropy(*leaves, labels, accumulate_dtype=torch.bfloat16, **chunks_of(8, leaves))
        torch.autograd.grad(loss, leaves)
    parts = (112, 11)
    per_chunk = [
        *((8, HIDDEN, columns) for columns in parts),
        *((columns, 8, HIDDEN) for columns in parts),
        *((8, columns, HIDDEN) for columns in parts),
    ]
    assert log.products == per_chunk * 2
    for vocab_size in (7, 15, 64, 128):  # few or aligned columns are multiplied together
        assert chunked_loss._fast_parts(torch.empty(1), vocab_size) == [slice(0, vocab_size)]
