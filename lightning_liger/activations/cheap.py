"""Selective recomputation: saved tensors that a memory-bound op can make again from others that autograd saves anyway.

Norm outputs, gated products, their casts, and rotated queries and keys if a norm made what was rotated. Ops report how
they made their outputs (``liger_ops.recipes``); when autograd saves such an output, the call that makes it is kept in
its place. In backward the first who asks makes the output again, and the last one drops it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from liger_ops.backend import autocast_dtype
from liger_ops.recipes import listening

_PLAIN = frozenset((Tensor, Parameter))
_CAST = "ToCopyBackward0"


def count_writes(tensor: Tensor) -> int:
    """The number of writes to a tensor so far; always 0 of those made in inference mode, which do not count them."""
    return 0 if tensor.is_inference() else tensor._version


class Kept:
    """A tensor that stays in memory."""

    __slots__ = ("num_writes", "tensor")  # one for each saved tensor

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.num_writes = count_writes(tensor)

    def get(self) -> Tensor:
        """Raises RuntimeError if the tensor was written to; with hooks on saved tensors, PyTorch does not look."""
        if count_writes(self.tensor) != self.num_writes:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {list(self.tensor.shape)} is at version {self.tensor._version}; expected version"
                f" {self.num_writes} instead"
            )
        return self.tensor


class _Call:
    """How the outputs of one call are made, and the outputs while some of their users still wait for them."""

    def __init__(self, outputs: Sequence[Tensor], function: Callable[..., Any], args: Sequence[Any]) -> None:
        self.function, self.args = function, args
        self.layouts = [_layout(each) for each in outputs]
        self.num_waiting = 0
        self.outputs: Sequence[Tensor] | None = None

    def get(self) -> Sequence[Tensor]:
        outputs = self.outputs
        if outputs is None:
            with torch.no_grad(), listening(None):
                result = self.function(*(arg.get() if isinstance(arg, Kept | Recomputed) else arg for arg in self.args))
            self.outputs = outputs = result if isinstance(result, tuple) else (result,)
            if [_layout(each) for each in outputs] != self.layouts:
                raise RuntimeError(f"{self.function.__name__} returned outputs with a different layout than in forward")
        return outputs  # not the attribute, which another thread's backward may empty meanwhile


class Recomputed:
    """A view, of this size, stride and offset, of an output that is not kept."""

    def __init__(self, call: _Call, index: int, *layout: Any) -> None:
        self.call, self.index, self.layout = call, index, layout
        self.has_asked = False
        call.num_waiting += 1

    def get(self) -> Tensor:
        output = self.call.get()[self.index].as_strided(*self.layout)
        self._release()
        return output

    def _release(self) -> None:
        if not self.has_asked:
            self.has_asked = True
            self.call.num_waiting -= 1
        if not self.call.num_waiting:  # also if backward runs over the graph once more
            self.call.outputs = None

    def __del__(self) -> None:
        self._release()  # backward may never ask, for parameters that are not on its path


class _Made:
    """An output of an op, as long as autograd may still save it."""

    def __init__(self, call: _Call, index: int, output: Tensor) -> None:
        self.call, self.index = call, index
        # While it exists, no other storage has this one's address, even after this one's memory was freed.
        self.storage = StorageWeakRef(output.untyped_storage())
        self.num_writes = output._version
        self.is_counted = False
        self.writes: Tensor | None = None
        """A tensor without memory that counts the same writes, if casts of the output are recomputed."""

    def again(self, tensor: Tensor) -> Recomputed:
        """What makes ``tensor``, a view of the output, again."""
        return Recomputed(self.call, self.index, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


class CheapTensors:
    """Decides for each tensor that autograd saves in one run of a layer whether to keep it or how to make it.

    Under autocast on ``device_type``, casts of outputs are recomputed too. Without ``drops``, tensors are only counted.
    """

    def __init__(self, device_type: str, drops: bool = True) -> None:
        self.dropped_bytes = self.largest_bytes = 0
        """Bytes of the outputs that were not kept, or need not be, so far."""
        self._made: dict[int, _Made] = {}
        # Under autocast also by autograd's node and its number among the node's outputs.
        self._by_node: dict[tuple[Any, int], _Made] = {}
        self._device_type = device_type
        self._drops = drops

    def listener(
        self, outputs: tuple[Tensor, ...], function: Callable[..., Any], args: Sequence[Any], keeps_inputs: bool
    ) -> None:
        """Notes how ``outputs`` were made, if their inputs are in memory until backward anyway."""
        if not outputs[0].requires_grad or not all(_owns_memory(output) for output in outputs):
            return
        kept: list[Any] = []
        for arg in args:
            if isinstance(arg, Tensor) and (found := self._find(arg)) is not None:
                kept.append(found.again(arg))
            elif not isinstance(arg, Tensor):
                kept.append(arg)
            # DeepSpeed frees a parameter outside of its module's forward and backward.
            elif type(arg) in _PLAIN and (keeps_inputs or not arg.requires_grad) and not hasattr(arg, "ds_id"):
                kept.append(keep(arg))
            else:
                return
        call = _Call(outputs, function, kept)
        has_casts = autocast_dtype(self._device_type) is not None
        for index, output in enumerate(outputs):
            made = _Made(call, index, output)
            self._made[made.storage.cdata] = made
            if has_casts:
                made.writes = output.detach()
                made.writes.data = output.new_empty(0)
                self._by_node[output.grad_fn, output.output_nr] = made

    def forget(self) -> None:
        """After the run: autograd holds :meth:`pack` as long as what it packed; so would all inputs live."""
        self._made.clear()
        self._by_node.clear()

    def _find(self, tensor: Tensor) -> _Made | None:
        """The output that ``tensor`` is, or is a view of; None if it is none, or one that was written to since."""
        if tensor.is_leaf or type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_neg():
            return None
        made = self._made.get(tensor.untyped_storage()._cdata)
        if made is None:
            return self._find_cast(tensor) if self._by_node else None
        is_same = tensor._version == made.num_writes and tensor.dtype == made.call.layouts[made.index][2]
        return made if is_same else None

    def _find_cast(self, tensor: Tensor) -> _Made | None:
        """The same for a cast of an output, which autocast makes for each linear layer anew."""
        cast = tensor if tensor._base is None else tensor._base
        node: Any = cast.grad_fn
        if node is None or tensor._version or node.name() != _CAST:
            return None
        source = self._by_node.get(node.next_functions[0])
        if source is None or source.writes is None or source.writes._version != source.num_writes:
            return None
        size, stride, _, device = source.call.layouts[source.index]
        if (cast.shape, cast.stride(), cast.device) != (size, stride, device) or not _owns_memory(cast):
            return None
        whole = Recomputed(source.call, source.index, size, stride, 0)
        made = _Made(_Call((cast,), torch.Tensor.to, (whole, cast.dtype)), 0, cast)
        self._made[made.storage.cdata] = made
        return made

    def pack(self, tensor: Tensor) -> Kept | Recomputed:
        """What to save in the place of ``tensor``, whose ``get`` gives the tensor back."""
        made = self._find(tensor)
        if made is None:
            return keep(tensor)
        if not made.is_counted:
            made.is_counted = True
            num_bytes = tensor.untyped_storage().nbytes()
            self.dropped_bytes += num_bytes
            self.largest_bytes = max(self.largest_bytes, num_bytes)
        return made.again(tensor) if self._drops else keep(tensor)


def _owns_memory(output: Tensor) -> bool:
    if type(output) is not Tensor or output.storage_offset():
        return False
    return output.untyped_storage().nbytes() == output.numel() * output.element_size() != 0


def keep(tensor: Tensor) -> Kept:
    """Keeps what autograd saves."""
    # An op may save its own output, whose graph it must not keep: the cycle would outlive a graph without a backward.
    return Kept(tensor if tensor.is_leaf else tensor.detach())


def _layout(tensor: Tensor) -> tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
