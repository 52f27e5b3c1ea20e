"""The memory that a step would take on a GPU, counted while it runs on the meta device.

Tensors of the meta device have shapes and no memory. Every operation of forward and backward passes a dispatch mode,
which adds the storages that the operation made and subtracts each when the last tensor on it is gone: the moments at
which PyTorch's caching allocator would allocate and free.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from liger_ops.loss.head_passes import BackwardArguments, ForwardArguments
from lightning_liger.lazy.tensor import NO_MEMORY
from lightning_liger.monitor.flops import FlopCounter

_aten = torch.ops.aten
_ALLOCATION = 512
"""PyTorch's allocator rounds sizes up to a multiple of so many bytes."""
_FLASH_MAX_HEAD_DIM = 256
_FLASH_ROWS = 128
_SECONDS_PER_FLOP = 1e-15


class Ledger(FlopCounter):
    """Counts the bytes of meta tensors and the matrix products made inside of its context.

    A :class:`~lightning_liger.activations.profile.Memory`, whose clock counts floating-point operations.

    Attributes:
        allocated: Bytes now.
        peak: Their maximum since the last reset.
        owner: Who owns the tensors that are made next.
        most: The most bytes that each owner had.
        spans: The bytes of each owner when the peak was reset, and at the peak that followed, of each reset so far.
    """

    def __init__(self) -> None:
        super().__init__(self._add_flops)
        self.allocated = self.peak = 0
        self.owner = ""
        self.most: Counter[str] = Counter()
        self.spans: list[tuple[Counter[str], Counter[str]]] = []
        self._at_reset: Counter[str] = Counter()
        self._at_peak: Counter[str] = Counter()
        self._by_owner: Counter[str] = Counter()
        self._live: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._held: dict[Any, tuple[str, int]] = {}
        # On a GPU too the layouts of lazy logits are on the meta device. Kept, so that no other has their addresses.
        self._layouts = {each._cdata: each for each in [NO_MEMORY.untyped_storage()]}
        self._flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.liger_ops.scale_gradient.default and args[0].dtype == args[2]:
            return args[0]  # in place, for the graph ends with this backward
        result = super().__torch_dispatch__(func, types, args, kwargs)
        is_layout = any(self._layouts.keys() & {each.untyped_storage()._cdata for each in _tensors(args)})
        for tensor in _tensors(result if isinstance(result, tuple | list) else (result,)):
            if is_layout:
                self._layouts[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            elif tensor.is_meta:
                self.add(tensor)
        if func in _TEMPORARIES:
            self.note(_TEMPORARIES[func](*args, **kwargs))
        return result

    def value_of(self, tensor: Tensor) -> bool:
        """The value that a model asks for: masks are those of rows without padding, which hide nothing."""
        if tensor.dtype == torch.bool:
            return True
        raise Unknowable("the model's forward depends on the values of tensors")

    def _add_flops(self, flops: int) -> None:
        self._flops += flops

    def add(self, tensor: Tensor, num_bytes: int | None = None) -> None:
        """Counts a tensor until its storage is gone, once for each storage: as ``num_bytes``, by default its size."""
        storage = tensor.untyped_storage()
        key = storage._cdata
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
        key = tensor.untyped_storage()._cdata
        reference, before, num_bytes = self._live[key]
        self._live[key] = reference, owner, num_bytes
        self._by_owner[before] -= num_bytes
        self._by_owner[owner] += num_bytes

    def hold(self, name: Any, owner: str, num_bytes: int) -> None:
        """Counts so many bytes, which are no tensor's, under a name; 0 releases them."""
        before = self._held.pop(name, None)
        if before is not None:
            self._change(before[0], -before[1])
        if num_bytes:
            self._held[name] = owner, num_bytes
            self._change(owner, num_bytes)

    def note(self, num_bytes: int) -> None:
        """Notes that so many bytes exist for a moment."""
        self._change(self.owner, num_bytes)
        self._change(self.owner, -num_bytes)

    def _change(self, owner: str, num_bytes: int) -> None:
        self.allocated += num_bytes
        self._by_owner[owner] += num_bytes
        if num_bytes > 0:
            self.most[owner] = max(self.most[owner], self._by_owner[owner])
        if self.allocated > self.peak:
            self.peak, self._at_peak = self.allocated, self._by_owner.copy()

    # Memory, of the profile

    def read(self) -> tuple[int, int]:
        return self.allocated, self.peak

    def reset_peak(self) -> None:
        self.spans.append((self._at_reset, self._at_peak))
        self.peak = self.allocated
        self._at_reset = self._at_peak = self._by_owner.copy()

    def total(self) -> int:
        return 0

    def available(self) -> int:
        return 0

    def mark(self) -> int:
        return self._flops

    def seconds(self, start: int, end: int) -> float:
        return (end - start) * _SECONDS_PER_FLOP


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values, and in those that are lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


class Unknowable(RuntimeError):
    """Raised where a model decides by values of tensors, which the meta device does not have."""


def _of_loss(arguments: ForwardArguments | BackwardArguments) -> int:
    """One chunk of logits and hidden states."""
    num_tokens, hidden_size = arguments.input.shape
    rows = min(arguments.chunk_size, num_tokens)
    hidden = 0 if rows == num_tokens else hidden_size
    return rows * (arguments.weight.shape[0] + hidden) * arguments.input.element_size()


def _of_flash_backward(grad: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    """A sum in float32 of the query's gradient, and gradients of keys and values for each query head."""
    batch_size, num_heads, seq_len, head_dim = query.shape
    rows = seq_len + -seq_len % _FLASH_ROWS
    grown = 2 * batch_size * num_heads * key.shape[2] * head_dim * key.element_size()
    return 4 * batch_size * num_heads * rows * (head_dim + 1) + (grown if key.shape[1] != num_heads else 0)


_TEMPORARIES: dict[Any, Callable[..., int]] = {
    torch.ops.liger_ops.linear_head.default: lambda *values: _of_loss(ForwardArguments(*values)),
    torch.ops.liger_ops.linear_head_backward.default: lambda *values: _of_loss(BackwardArguments(*values)),
    _aten._scaled_dot_product_flash_attention_backward.default: _of_flash_backward,
}
"""What operations allocate and free before they return."""


def _flops_of_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """The two products, of each query head, whatever number of heads keys and values have."""
    return 2 * query.shape[:-1].numel() * key.shape[2] * (query.shape[-1] + value.shape[-1])


def _flops_of_attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """The products of scores again, and the four of the gradients."""
    return 2 * query.shape[:-1].numel() * key.shape[2] * (3 * query.shape[-1] + 2 * value.shape[-1])


Ledger.formulas = {
    **FlopCounter.formulas,
    # PyTorch's own formulas raise for grouped queries up to some version.
    _aten._scaled_dot_product_flash_attention: _flops_of_attention,
    _aten._scaled_dot_product_efficient_attention: _flops_of_attention,
    _aten._scaled_dot_product_flash_attention_backward: _flops_of_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _flops_of_attention_backward,
}


class AttentionOfGpus(TorchFunctionMode):
    """Runs the backend of scaled dot product attention that PyTorch takes on a GPU, not math as on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(func, *args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    head_dim = query.shape[-1]
    if query.dim() == 4 and (attn_mask is None or not attn_mask.requires_grad):
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        same_width = value.shape[-1] == head_dim
        if is_half and attn_mask is None and same_width and head_dim <= _FLASH_MAX_HEAD_DIM:
            padding = -head_dim % 8
            parts = [F.pad(each, (0, padding)) if padding else each for each in (query, key, value)]
            scale = head_dim**-0.5 if scale is None else scale
            result = _aten._scaled_dot_product_flash_attention(*parts, dropout_p, is_causal, scale=scale)[0]
            return result[..., :head_dim] if padding else result
        if not enable_gqa or key.shape[1] == query.shape[1]:
            if attn_mask is not None:
                attn_mask = _as_bias(attn_mask, query, key)
            return _aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
            )[0]
    return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the memory-efficient backend takes it: added to the scores, in rows of a multiple of 16 columns."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype, device=mask.device), -torch.inf).to(query.dtype)
    padding = -mask.shape[-1] % 16
    if padding:
        mask = F.pad(mask, (0, padding))[..., : key.shape[2]]
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
