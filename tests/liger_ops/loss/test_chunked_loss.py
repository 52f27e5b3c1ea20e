"""The chunk loop alone, and its operations and memory in linear_cross_entropy.

On its own it runs with a loss that is no cross entropy: half the squared logits, whose gradient is the logits.
"""

import importlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_ops import linear_cross_entropy
from liger_ops.loss.chunked_loss import (
    CPU_CHUNK_BYTES,
    Gradients,
    KeptTokens,
    choose_accumulate_dtype,
    choose_chunk_size,
    chunked_linear_loss,
    default_chunk_size,
)
from liger_ops.loss.options import Targets
from liger_ops.loss.token_plan import plan_tokens
from tests.liger_ops.loss.test_linear_cross_entropy import (
    HIDDEN,
    WHOLE,
    chunks_of,
    loss_and_gradients,
    make_batch,
    plain_linear_cross_entropy,
)

LINEAR_CROSS_ENTROPY = importlib.import_module("liger_ops.loss.head_passes")
IGNORED = -100
ALL_GRADIENTS = (True, True, True)


MIB = 2**20
CUDA = torch.device("cuda")

sizes = {
    "num_tokens": st.one_of(st.integers(0, 5000), st.integers(0, 1_000_000)),
    "vocab_size": st.one_of(st.integers(1, 300_000), st.sampled_from([32000, 128256, 262144])),
    "element_size": st.sampled_from([2, 4, 8]),
}
many_examples = settings(max_examples=500, deadline=None, derandomize=True, database=None)


def rows_within(num_bytes: int, token_bytes: int) -> int:
    """How many tokens' logits fit, in whole tiles where there are several."""
    rows = num_bytes // token_bytes
    return max(1, rows - rows % (256 if rows > 512 else 16 if rows > 128 else 1))


@many_examples
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


@many_examples
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


@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "hidden_size", "rows"),
    [
        pytest.param(16, 128 * 1024, 0, 16, id="4MiB_are_whole"),
        pytest.param(2047, 128 * 1024, 4096, 2047, id="too_few_for_two_chunks"),
        pytest.param(1024, 4 * 1024 * 1024, 0, 256, id="too_many_bytes_for_one_chunk"),
        pytest.param(2048, 128 * 1024, 4096, 1024, id="two_chunks"),
        pytest.param(16384, 32 * 1024, 0, 8192, id="512MiB"),
        pytest.param(6 * 8192, 128 * 1024, 0, 8192, id="2GiB"),
        pytest.param(7 * 8192, 128 * 1024, 4096, 8192, id="sums_in_float32"),
        pytest.param(5 * 8192, 128 * 1024, 4096, 10240, id="sums_in_bfloat16_cost_no_more"),
        pytest.param(4 * 4096, 128 * 1024, 4096, 4096, id="four_chunks"),
        pytest.param(20000, 128256, 4096, 5120, id="four_chunks_of_whole_tiles"),
        pytest.param(8192, 200 * 1024, 4096, 2048, id="2048_tokens"),
        pytest.param(4096, 128256, 2048, 2048, id="two_chunks_of_a_narrow_head"),
        pytest.param(4096, 128256, 4096, 1536, id="three_chunks_save_memory"),
        pytest.param(4096, 152064, 5120, 2048, id="two_chunks_as_four_take_too_much_time"),
        pytest.param(4096, 128256, 0, 2048, id="frozen_head"),
    ],
)
def test_default_chunk_on_a_gpu(num_tokens: int, vocab_size: int, hidden_size: int, rows: int) -> None:
    assert default_chunk_size(num_tokens, vocab_size, 2, CUDA, hidden_size) == rows


@pytest.mark.parametrize("num_tokens", [0, 2, 1000])
def test_default_chunk_is_that_of_a_cpu_or_a_gpu(num_tokens: int) -> None:
    expected = choose_chunk_size(num_tokens, 32000, 2, CPU_CHUNK_BYTES)
    assert default_chunk_size(num_tokens, 32000, 2, torch.device("cpu")) == expected
    on_gpu, on_meta = (default_chunk_size(num_tokens, 32000, 2, torch.device(each)) for each in ("cuda", "meta"))
    assert on_meta == on_gpu


@pytest.mark.parametrize(
    ("num_tokens", "rows"),
    [(0, 1), (1, 1), (2, 1), (7, 4), (256, 128), (257, 144), (1200, 768), (8192, 2048), (8193, 1792), (100_000, 2048)],
)
def test_chunk_size_spreads_tokens_evenly_over_the_fewest_chunks(num_tokens: int, rows: int) -> None:
    assert choose_chunk_size(num_tokens, 131072, 2, 512 * MIB) == rows  # 2048 rows fit


def test_chunk_size_is_one_token_when_not_even_that_fits() -> None:
    assert choose_chunk_size(100, 131072, 2, 1) == 1


@pytest.mark.parametrize(
    ("weight_dtype", "num_chunks", "expected"),
    [
        (torch.bfloat16, 4, torch.bfloat16),
        (torch.bfloat16, 5, torch.float32),
        (torch.float16, 1, torch.float32),
        (torch.float32, 1, torch.float32),
        (torch.float64, 9, torch.float64),
    ],
    ids=str,
)
def test_accumulate_dtype_rounds_only_few_bfloat16_sums(
    weight_dtype: torch.dtype, num_chunks: int, expected: torch.dtype
) -> None:
    assert choose_accumulate_dtype(weight_dtype, num_chunks) == expected


def kept_tokens(labels: Tensor, max_kept: int | None = None, *, in_order: bool = False) -> KeptTokens:
    like = torch.empty(1, device=labels.device)
    plan = plan_tokens(Targets(labels, None, None), 50, IGNORED, like, with_order=not in_order)
    return KeptTokens(plan.order, plan.num_kept if max_kept is None else max_kept)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("max_kept", [None, 0, 4, 100])
@pytest.mark.parametrize("labels", [[5, IGNORED, 0, IGNORED, 7], [IGNORED, IGNORED], [1, 2, 3], []], ids=str)
def test_kept_tokens_are_as_many_as_counted_unless_the_host_has_a_bound(
    labels: list[int], max_kept: int | None, device: str
) -> None:
    tokens = kept_tokens(torch.tensor(labels, dtype=torch.int64, device=device), max_kept)
    num_kept = sum(label != IGNORED for label in labels)
    assert tokens.count() == (num_kept if max_kept is None else max_kept)
    assert tokens.count() == tokens.count()
    assert all(labels[token] != IGNORED for token in tokens.order[:num_kept].tolist())


class OnOtherGpu(Tensor):
    """A number that says that it is on another GPU than the current one."""

    is_cuda = True
    device = torch.device("cuda", 1)


def test_number_of_kept_tokens_waits_for_the_stream_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = []
    event = SimpleNamespace(record=streams.append, synchronize=lambda: None)
    pinned = torch.zeros((), dtype=torch.int64)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pinned)
    assert KeptTokens(None, torch.tensor(3).as_subclass(OnOtherGpu)).count() == 3
    assert streams == ["stream of cuda:1"]


@pytest.mark.multi_gpu
def test_tokens_of_another_gpu_than_the_current_one_are_counted() -> None:
    tensors, labels = make_batch(64, 50, device="cuda:1")
    expected = loss_and_gradients(linear_cross_entropy, tensors, labels, **chunks_of(8, tensors))
    with torch.cuda.device(1):
        torch.cuda._sleep(10**9)
    actual = loss_and_gradients(linear_cross_entropy, tensors, labels, **chunks_of(8, tensors))
    torch.testing.assert_close(actual, expected)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [8, 11])
def test_padding_of_a_chunk_is_zero(vocab_size: int, dtype: torch.dtype) -> None:
    # Matrix products in half precision read it on some CPUs, where NaN would spread.
    hidden_states, weight = torch.randn(5, 3).to(dtype), torch.randn(vocab_size, 3).to(dtype)
    paddings = []

    def loss(logits: Tensor, index: Tensor | None) -> None:
        assert (logits.stride(0) * logits.element_size()) % 16 == 0
        paddings.append(logits._base[: len(logits), vocab_size:].clone())

    chunked_linear_loss(
        hidden_states, weight, None, kept_tokens(torch.arange(5)), loss,
        chunk_size=2, accumulate_dtype=torch.float32, needs_gradient=ALL_GRADIENTS,
    )  # fmt: skip
    assert [len(padding) for padding in paddings] == [2, 2, 1]
    assert all(padding.numel() > 0 or vocab_size == 8 for padding in paddings)
    assert not any(padding.any() for padding in paddings)


def run_half_squares(
    labels: Tensor,
    *,
    chunk_size: int,
    bias: bool = True,
    in_order: bool = False,
    max_kept: int | None = None,
    accumulate_dtype: torch.dtype = torch.float64,
    needs_gradient: tuple[bool, bool, bool] = ALL_GRADIENTS,
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Gradients, list[list[int]]]:
    """Runs the loop; returns its inputs, its gradients, and the tokens of every chunk."""
    generator = torch.Generator().manual_seed(0)
    hidden_states, weight, bias_value = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((len(labels), 3), (5, 3), (5,))
    )
    before = hidden_states.clone()
    bias_value = bias_value if bias else None
    visited = []

    def chunk_loss(logits: Tensor, index: Tensor | None) -> None:
        assert (index is None) == in_order
        index = torch.arange(len(labels)) if index is None else index
        visited.append(index.tolist())
        torch.testing.assert_close(logits, torch.nn.functional.linear(hidden_states[index], weight, bias_value))
        assert logits.data_ptr() % 16 == 0
        assert len(index) == 1 or logits.stride(0) * logits.element_size() % 16 == 0
        logits[labels[index] == IGNORED] = 0.0

    tokens = kept_tokens(labels, len(labels) if in_order else max_kept, in_order=in_order)
    gradients = chunked_linear_loss(
        hidden_states, weight, bias_value, tokens, chunk_loss,
        chunk_size=chunk_size, accumulate_dtype=accumulate_dtype, needs_gradient=needs_gradient,
    )  # fmt: skip
    assert torch.equal(hidden_states, before)
    return (hidden_states, weight, bias_value), gradients, visited


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(
    ("chunk_size", "in_order"), [(1, False), (3, False), (4, False), (7, False), (11, False), (11, True), (50, True)]
)
def test_gradients_do_not_depend_on_the_chunks(chunk_size: int, in_order: bool, bias: bool) -> None:
    labels = torch.tensor([0, IGNORED, 0, 0, IGNORED, 0, 0, IGNORED, 0, 0, 0])
    inputs, gradients, _ = run_half_squares(
        labels, chunk_size=chunk_size, bias=bias, in_order=in_order, needs_gradient=(True, True, bias)
    )
    leaves = [tensor.requires_grad_() for tensor in inputs if tensor is not None]
    logits = torch.nn.functional.linear(leaves[0], leaves[1], leaves[2] if bias else None)
    expected = torch.autograd.grad(logits[labels != IGNORED].square().sum() / 2, leaves)
    torch.testing.assert_close(tuple(gradients)[: len(leaves)], expected)


@pytest.mark.filterwarnings("error:An output with one or more elements was resized")
@pytest.mark.parametrize(
    ("num_kept", "chunk_size", "max_kept", "sizes"),
    [
        (8, 3, None, [3, 3, 2]),
        (6, 3, None, [3, 3]),
        (1, 3, None, [3]),  # the first chunk is filled before the count is known
        (0, 3, None, [3]),
        (10, 3, None, [3, 3, 3, 1]),
        (5, 20, None, [10]),
        (5, 3, 5, [3, 2]),
        (5, 3, 7, [3, 3, 1]),
        (5, 3, 100, [3, 3, 3, 1]),
    ],
)
def test_ignored_tokens_past_the_first_chunk_are_never_projected(
    num_kept: int, chunk_size: int, max_kept: int | None, sizes: list[int]
) -> None:
    labels = torch.full((10,), IGNORED)
    labels[-num_kept or 10 :] = 0
    _, gradients, visited = run_half_squares(labels, chunk_size=chunk_size, max_kept=max_kept)
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
@pytest.mark.parametrize(("chunk_size", "in_order"), [(3, False), (7, True)], ids=["chunks", "whole"])
def test_gradients_not_asked_for_are_empty(
    chunk_size: int, in_order: bool, needs_gradient: tuple[bool, bool, bool]
) -> None:
    labels = torch.zeros(7, dtype=torch.int64)
    run = {"chunk_size": chunk_size, "in_order": in_order}
    _, expected, _ = run_half_squares(labels, **run)
    _, gradients, _ = run_half_squares(labels, needs_gradient=needs_gradient, **run)
    for gradient, full, needed in zip(gradients[:3], expected[:3], needs_gradient, strict=True):
        assert torch.equal(gradient, full) if needed else gradient.numel() == 0


@pytest.mark.parametrize(("num_tokens", "in_order"), [(0, False), (0, True), (5, False)])
def test_head_gradients_have_the_dtype_they_are_summed_in(num_tokens: int, in_order: bool) -> None:
    labels = torch.zeros(num_tokens, dtype=torch.int64)
    _, gradients, visited = run_half_squares(labels, chunk_size=2, in_order=in_order, accumulate_dtype=torch.float32)
    assert [gradient.dtype for gradient in gradients[:3]] == [torch.float64, torch.float32, torch.float32]
    assert [gradient.shape for gradient in gradients[:3]] == [(num_tokens, 3), (5, 3), (5,)]
    assert bool(gradients.weight.any()) == (num_tokens > 0) == bool(visited)


class OperatorLog(TorchDispatchMode):
    """Records the operators, their largest output and the sizes of matrix products, also inside our op."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.largest, self.products, self.operators = 0, [], set()

        def logged_loop(*args: Any, **kwargs: Any) -> Gradients:
            with self:
                return chunked_linear_loss(*args, **kwargs)

        monkeypatch.setattr(LINEAR_CROSS_ENTROPY, "chunked_linear_loss", logged_loop)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
def test_only_the_products_that_are_needed_are_computed(
    needed: tuple[bool, bool, bool], per_chunk: int, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_no_tensor_of_the_size_of_the_logits_ever_exists(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("max_valid_tokens", [None, 10], ids=["", "max_valid_tokens"])
@pytest.mark.parametrize("num_kept", [0, 3, 10])
def test_ignored_tokens_are_left_out_of_the_products(
    num_kept: int, max_valid_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, labels = make_batch(40, 50)
    labels.fill_(-100)
    labels[torch.randperm(40)[:num_kept]] = 7
    log = OperatorLog(monkeypatch)
    with log, torch.no_grad():
        linear_cross_entropy(*tensors[:2], labels, max_valid_tokens=max_valid_tokens, **chunks_of(4, tensors))
    expected = max(4, num_kept) if max_valid_tokens is None else max_valid_tokens
    assert sum(shape[0] for shape in log.products) == expected


@pytest.mark.parametrize("num_kept", [0, 10])
def test_one_chunk_of_all_tokens_sorts_and_copies_none(num_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, labels = make_batch(12, 50)
    labels[num_kept:] = -100
    log = OperatorLog(monkeypatch)
    with log:
        loss_and_gradients(linear_cross_entropy, tensors, labels, **chunks_of(WHOLE, tensors))
    assert [shape[0] for shape in log.products] == [12, 50, 12]  # the logits and the gradients of weight and input
    assert not log.operators & {torch.ops.aten.sort, torch.ops.aten.argsort, torch.ops.aten.index_select}


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_chunk_size_never_changes_the_answer(reduction: str) -> None:
    tensors, labels = make_batch(37, 50, dtype=torch.float64)
    upstream = torch.randn(37) if reduction == "none" else None
    options = {"upstream": upstream, "reduction": reduction, "label_smoothing": 0.1, "z_loss_weight": 0.1}
    truth = loss_and_gradients(plain_linear_cross_entropy, tensors, labels, **options)
    for rows in (1, 2, 5, 18, 500, WHOLE):
        actual = loss_and_gradients(linear_cross_entropy, tensors, labels, **options, **chunks_of(rows, tensors))
        torch.testing.assert_close(actual, truth)
    defaults = loss_and_gradients(linear_cross_entropy, tensors, labels, **options)
    torch.testing.assert_close(defaults, truth)


@pytest.mark.parametrize("acc_dtype", [None, torch.float32])
def test_pytorchs_options_are_followed(acc_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, labels = make_batch(12, 50, dtype=torch.bfloat16)
    labels.clamp_(min=0)
    make_options = getattr(torch.nn, "LinearCrossEntropyOptions", SimpleNamespace)
    log = OperatorLog(monkeypatch)
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
