"""Heads whose sizes keep matrix products from their fast kernels: multiplied in parts, or with padding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_ops import linear_cross_entropy
from liger_ops.loss import chunked_loss
from tests.liger_ops.accuracy import assert_as_accurate
from tests.liger_ops.loss.test_linear_cross_entropy import MODULE, WHOLE, chunks_of, make_batch, plain_cross_entropy

VOCAB, COLUMNS = 123, 112  # of which so many are multiplied together
RANK = 3


@pytest.fixture(autouse=True)
def _as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "_product_multiple", lambda like: 8)
    monkeypatch.setattr(chunked_loss, "_COLUMN_MULTIPLE", 16)
    monkeypatch.setattr(chunked_loss, "_LONG_ROW", 64)


def run(function: Any, tensors: list[Tensor], needed: tuple[bool, ...], upstream: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)]
    loss = function(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [loss, *torch.autograd.grad(loss, wanted, upstream.to(loss))]


FROZEN = ((), (0,), (1,), (1, 2), (0, 1, 2), (3,), (4,))


@pytest.mark.parametrize("rows", [3, WHOLE], ids=["chunks", "whole"])
@pytest.mark.parametrize(
    ("hidden_size", "reduction", "dtype", "frozen"),
    [
        (16, "mean", torch.float32, ()),
        (16, "none", torch.bfloat16, ()),
        (13, "mean", torch.bfloat16, ()),
        (13, "sum", torch.float16, ()),
        *((13, reduction, torch.float32, frozen) for reduction in ("mean", "none") for frozen in FROZEN),
    ],
    ids=str,
)
def test_every_gradient_matches_plain_pytorch(
    hidden_size: int, reduction: str, dtype: torch.dtype, frozen: tuple[int, ...], rows: int
) -> None:
    tensors, labels = make_batch(8, VOCAB, dtype=dtype)
    tensors = [*tensors, torch.randn(8, RANK).to(dtype), torch.randn(VOCAB, RANK).to(dtype)]
    tensors[:2] = (tensor[:, :hidden_size].contiguous() for tensor in tensors[:2])
    upstream = torch.randn(8 if reduction == "none" else ())
    needed = tuple(index not in frozen for index in range(5))

    def fused(x: Tensor, weight: Tensor, bias: Tensor, *adapter: Tensor) -> Tensor:
        return linear_cross_entropy(
            x, weight, labels, linear_bias=bias, adapter=adapter, reduction=reduction, softcap=8.0,
            saved_logits_bytes=4 * VOCAB * dtype.itemsize, **chunks_of(rows, tensors),
        )  # fmt: skip

    def plain(x: Tensor, weight: Tensor, bias: Tensor, *adapter: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(x, weight, bias) + adapter[0] @ adapter[1].t()
        return plain_cross_entropy(logits, labels, reduction=reduction, softcap=8.0)

    actual = run(fused, tensors, needed, upstream)
    eager = run(plain, tensors, needed, upstream)
    truth = run(plain, [tensor.double() for tensor in tensors], needed, upstream)
    for index, results in enumerate(zip(actual, eager, truth, strict=True)):
        assert_as_accurate(f"result {index}", *results)
        assert results[0].shape == results[1].shape
        assert results[0].is_contiguous()


class ProductLog(TorchDispatchMode):
    """Records the sizes ``(rows, inner size, columns)`` of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        matrices = {torch.ops.aten.mm: args[:2], torch.ops.aten.addmm: args[1:3]}.get(func.overloadpacket)
        if matrices is not None:
            self.sizes.append((*matrices[0].shape, matrices[1].shape[1]))
        return func(*args, **(kwargs or {}))


def test_all_but_a_few_columns_are_multiplied_in_aligned_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, labels = make_batch(16, VOCAB, dtype=torch.bfloat16)
    labels.clamp_(min=0)
    leaves = [tensor[:, :13].contiguous().requires_grad_() for tensor in tensors[:2]]
    log = ProductLog()

    def logged_loop(*args: Any, **kwargs: Any) -> chunked_loss.Gradients:
        with log:
            return chunked_loss.chunked_linear_loss(*args, **kwargs)

    monkeypatch.setattr(MODULE, "chunked_linear_loss", logged_loop)
    loss = linear_cross_entropy(*leaves, labels, accumulate_dtype=torch.bfloat16, **chunks_of(8, leaves))
    torch.autograd.grad(loss, leaves)
    rest = VOCAB - COLUMNS
    of_chunk = [
        *((8, 16, columns) for columns in (COLUMNS, rest)),
        *((columns, 8, 16) for columns in (COLUMNS, rest)),
        *((8, columns, 16) for columns in (COLUMNS, rest)),
    ]
    assert log.sizes == of_chunk * 2


@pytest.mark.parametrize("vocab_size", [7, 15, 64, 128])
def test_few_or_aligned_columns_are_multiplied_together(vocab_size: int) -> None:
    assert chunked_loss._fast_parts(torch.empty(1), vocab_size) == [slice(0, vocab_size)]


@pytest.mark.parametrize(("vocab_size", "row"), [(63, 64), (64, 64), (65, 128), (120, 128), (128, 128)])
def test_long_rows_start_at_cache_lines(vocab_size: int, row: int) -> None:
    rows = chunked_loss.aligned_rows(torch.empty(1, dtype=torch.bfloat16), 3, vocab_size)
    assert rows.shape == (3, vocab_size)
    assert rows.stride() == (row, 1)
    assert not rows._base[:, vocab_size:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1031, 1032, 50257])
def test_input_gradients_of_many_tokens_add_up_as_accurately_as_eager_ones(vocab_size: int) -> None:
    """Rounding errors that are alike in all tokens show in their sum, as in the gradient of an earlier layer."""
    torch.manual_seed(0)
    x = torch.randn(1028, 128, device="cuda", dtype=torch.bfloat16)
    weight = 0.02 * torch.randn(vocab_size, 128, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(vocab_size, (1028,), device="cuda")

    def summed(loss: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        leaf = x.to(dtype).requires_grad_()
        return torch.autograd.grad(loss(leaf, weight.to(dtype), target), leaf)[0].double().sum(0)

    def eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = x @ weight.T
        return torch.nn.functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)

    truth = summed(eager, torch.float64)
    of_ours, of_eager = (
        (summed(loss, torch.bfloat16) - truth).norm() / truth.norm() for loss in (linear_cross_entropy, eager)
    )
    assert of_ours <= 1.5 * of_eager + 1e-3, (of_ours, of_eager)
