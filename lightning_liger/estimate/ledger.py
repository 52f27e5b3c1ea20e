"""The memory that a step would take on a GPU, counted while it runs on the meta device.

Tensors of the meta device have shapes and no memory. Every operation of forward and backward passes a dispatch mode,
which adds the storages that the operation made and subtracts each when the last tensor on it is gone: the moments at
which PyTorch's caching allocator would allocate and free.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from liger_ops.loss.head_passes import BackwardArguments, ForwardArguments
from lightning_liger.activations.frames import tensors_in
from lightning_liger.lazy.tensor import NO_MEMORY
from lightning_liger.monitor.flops import ValuesOfMeta

_ALLOCATION = 512
"""PyTorch's allocator rounds sizes up to a multiple of so many bytes."""
_FLASH_MAX_HEAD_DIM = 256
_FLASH_ROWS, _EFFICIENT_ROWS = 128, 32
"""The numbers of queries that sums of attention are padded to a multiple of."""
_SECONDS_PER_FLOP = 1e-15
_FLOAT8_PRODUCT = torch.ops.aten._scaled_mm.default


class Ledger(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes of meta tensors and the matrix products made inside of its context.

    A memory as of :class:`~lightning_liger.activations.profile.CudaMemory`, whose clock counts FLOPs.

    Attributes:
        allocated: Bytes now.
        peak: Their maximum since the last reset.
        owner: Who owns the tensors that are made next.
        most: The most bytes that each owner had.
        peaks: The bytes of each owner at each peak that was reset.
        flops: Floating-point operations so far, of products in float8 half.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.peak = self.flops = 0
        self.owner = ""
        self.most: Counter[str] = Counter()
        self.peaks: list[Counter[str]] = []
        self._at_peak: Counter[str] = Counter()
        self._by_owner: Counter[str] = Counter()
        self._live: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._held: dict[Any, tuple[str, int]] = {}
        # On a GPU too the layouts of lazy logits are on the meta device. Kept, so that no other has their ids.
        self._layouts = {id(each): each for each in [NO_MEMORY.untyped_storage()]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.liger_ops.scale_gradient.default and args[0].dtype == args[2]:
            return args[0]  # in place, for the graph ends with this backward
        result = func(*args, **kwargs)
        if formula := flop_registry.get(func.overloadpacket):
            self.flops += formula(*args, **kwargs, out_val=result) // (2 if func is _FLOAT8_PRODUCT else 1)
        is_layout = any(id(each.untyped_storage()) in self._layouts for each in tensors_in(args))
        for tensor in tensors_in(result):
            if is_layout:
                self._layouts[id(tensor.untyped_storage())] = tensor.untyped_storage()
            elif tensor.is_meta:
                self.add(tensor)
        if func in _TEMPORARIES:
            self.note(_TEMPORARIES[func](*args, **kwargs))
        return result

    def add(self, tensor: Tensor, num_bytes: int | None = None) -> None:
        """Counts a tensor until its storage is gone, once for each storage: as ``num_bytes``, by default its size."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live:
            return
        if num_bytes is None:
            num_bytes = -(-storage.nbytes() // _ALLOCATION) * _ALLOCATION
        self._live[key] = weakref.ref(storage, lambda _: self._free(key)), self.owner, num_bytes
        self._change(self.owner, num_bytes)

    def _free(self, key: int) -> None:
        _, owner, num_bytes = self._live.pop(key)
        self._change(owner, -num_bytes)

    def give(self, tensor: Tensor, owner: str) -> None:
        """Changes the owner of a tensor that is counted."""
        key = id(tensor.untyped_storage())
        reference, before, num_bytes = self._live[key]
        self._live[key] = reference, owner, num_bytes
        self._by_owner[before] -= num_bytes
        self._by_owner[owner] += num_bytes

    def hold(self, name: Any, owner: str, num_bytes: int) -> None:
        """Counts so many bytes, which are no tensor's, under a name; 0 releases them."""
        before, held = self._held.pop(name, (owner, 0))
        self._change(before, -held)
        self._held[name] = owner, num_bytes
        self._change(owner, num_bytes)

    def note(self, num_bytes: int) -> None:
        """Notes that so many bytes exist for a moment."""
        self._change(self.owner, num_bytes)
        self._change(self.owner, -num_bytes)

    def _change(self, owner: str, num_bytes: int) -> None:
        self.allocated += num_bytes
        self._by_owner[owner] += num_bytes
        self.most[owner] = max(self.most[owner], self._by_owner[owner])
        if self.allocated > self.peak:
            self.peak, self._at_peak = self.allocated, self._by_owner.copy()

    def read(self) -> tuple[int, int]:
        return self.allocated, self.peak

    def reset_peak(self) -> None:
        self.peaks.append(self._at_peak)
        self.peak, self._at_peak = self.allocated, self._by_owner.copy()

    def mark(self) -> int:
        return self.flops

    def seconds(self, start: int, end: int) -> float:
        return (end - start) * _SECONDS_PER_FLOP


def _head_bytes(arguments: ForwardArguments | BackwardArguments) -> int:
    """One chunk of logits and hidden states."""
    num_tokens, hidden_size = arguments.input.shape
    rows = min(arguments.chunk_size, num_tokens)
    hidden = 0 if rows == num_tokens else hidden_size
    return rows * (arguments.weight.shape[0] + hidden) * arguments.input.element_size()


_TEMPORARIES: dict[Any, Callable[..., int]] = {
    torch.ops.liger_ops.linear_head.default: lambda *values: _head_bytes(ForwardArguments(*values)),
    torch.ops.liger_ops.linear_head_backward.default: lambda *values: _head_bytes(BackwardArguments(*values)),
}
"""What operations allocate and free before they return."""


class Unknowable(Exception):
    """Raised where a model decides by values of tensors, which the meta device does not have."""


class OnGpu(ValuesOfMeta):
    """Runs the backend of scaled dot product attention that PyTorch takes on a GPU, not math as on the meta device.

    Masks are those of rows without padding, which hide nothing; other values are unknowable.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def value_of(self, tensor: Tensor) -> Any:
        if tensor.dtype != torch.bool:
            raise Unknowable("the model's forward depends on the values of tensors")
        return super().value_of(tensor)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **options: Any
    ) -> Tensor:
        head_dim = query.shape[-1]
        if query.dim() == 4 and (attn_mask is None or not attn_mask.requires_grad):
            is_half, same_width = query.dtype in (torch.float16, torch.bfloat16), value.shape[-1] == head_dim
            if is_half and attn_mask is None and same_width and head_dim <= _FLASH_MAX_HEAD_DIM:
                padding = -head_dim % 8
                parts = [F.pad(each, (0, padding)) if padding else each for each in (query, key, value)]
                result = _Attention.apply(self._ledger, *parts, None, True)
                return result[..., :head_dim] if padding else result
            if key.shape[1] == query.shape[1]:
                bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
                return _Attention.apply(self._ledger, query, key, value, bias, False)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **options)


class _Attention(torch.autograd.Function):
    """What flash attention allocates and computes, or the memory-efficient backend."""

    @staticmethod
    def forward(
        ctx: Any, ledger: Ledger, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_flash: bool
    ) -> Tensor:
        batch_size, num_heads, seq_len, head_dim = query.shape
        width = value.shape[-1]
        rows_first = (batch_size, seq_len, num_heads, width)
        output = torch.empty_like(query) if is_flash else query.new_empty(rows_first).transpose(1, 2)
        rows = seq_len if is_flash else seq_len + -seq_len % _EFFICIENT_ROWS
        sums = query.new_empty(batch_size, num_heads, rows, dtype=torch.float32)
        # Of each query head, whatever number of heads keys and values have.
        ctx.product = 2 * batch_size * num_heads * seq_len * key.shape[2]
        ledger.flops += ctx.product * (head_dim + width)
        ctx.save_for_backward(query, key, value, bias, output, sums)
        ctx.ledger, ctx.is_flash = ledger, is_flash
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        query, key, value, *_ = ctx.saved_tensors
        batch_size, num_heads, seq_len, head_dim = query.shape
        gradients = [torch.empty_like(each) for each in (query, key, value)]
        # The products of scores again, and the four of the gradients.
        ctx.ledger.flops += ctx.product * (3 * head_dim + 2 * value.shape[-1])
        if ctx.is_flash:  # a sum in float32 of the query's gradient, and gradients of keys and values of query heads
            sums = 4 * batch_size * num_heads * (seq_len + -seq_len % _FLASH_ROWS) * (head_dim + 1)
            grown = 2 * batch_size * num_heads * key.shape[2] * head_dim * key.element_size()
            ctx.ledger.note(sums + (grown if key.shape[1] != num_heads else 0))
        return None, *gradients, None, None


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the memory-efficient backend takes it: added to the scores, in rows of a multiple of 16 columns."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype, device=mask.device), -torch.inf).to(query.dtype)
    padding = -mask.shape[-1] % 16
    if padding:
        mask = F.pad(mask, (0, padding))[..., : key.shape[2]]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
