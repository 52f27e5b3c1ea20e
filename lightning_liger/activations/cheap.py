"""Tensors that autograd would keep although a memory-bound op can make them again from others that it keeps anyway.

Norm outputs, gated products, their casts, and rotated queries and keys if a norm made what was rotated. Ops report how
they made their outputs (``liger_ops.recipes``); when autograd saves such an output, the recipe is kept in its place. In
backward the first who asks makes the output again, and the last one drops it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from liger_ops.recipes import listening

_PLAIN = frozenset((Tensor, Parameter))
_CAST = "ToCopyBackward0"
_VIEWS = frozenset(
    ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TBackward0", "TransposeBackward0")
)


class Kept:
    """A saved tensor that stays in memory."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def get(self) -> Tensor:
        """Raises RuntimeError if the tensor was written to; with hooks on saved tensors, PyTorch does not look."""
        tensor = self.tensor
        if tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {list(tensor.shape)} is at version {tensor._version}; expected version"
                f" {self.version} instead"
            )
        return tensor


class _Recipe:
    """How the outputs of one call are made, and the outputs while some of their users still wait for them."""

    __slots__ = ("args", "function", "layouts", "num_waiting", "outputs")

    def __init__(self, outputs: Sequence[Tensor], function: Callable[..., Any], args: Sequence[Any]) -> None:
        self.function = function
        self.args = args
        self.layouts = [(each.shape, each.stride(), each.dtype) for each in outputs]
        self.num_waiting = 0
        self.outputs: Sequence[Tensor] | None = None

    def get(self) -> Sequence[Tensor]:
        if self.outputs is None:
            args = [arg.get() if isinstance(arg, Kept | Recomputed) else arg for arg in self.args]
            with torch.no_grad(), listening(None):
                outputs = self.function(*args)
            self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            if [(each.shape, each.stride(), each.dtype) for each in self.outputs] != self.layouts:
                raise RuntimeError(f"{self.function.__name__} made outputs of another layout than in forward")
        return self.outputs

    def release(self) -> None:
        self.num_waiting -= 1
        if not self.num_waiting:
            self.outputs = None


class Recomputed:
    """A view of an output that is not kept."""

    __slots__ = ("has_asked", "index", "layout", "recipe")

    def __init__(self, recipe: _Recipe, index: int, view: Tensor) -> None:
        self.recipe = recipe
        self.index = index
        self.layout = view.shape, view.stride(), view.storage_offset()
        self.has_asked = False
        recipe.num_waiting += 1

    def get(self) -> Tensor:
        output = self.recipe.get()[self.index].as_strided(*self.layout)
        self._release()
        return output

    def _release(self) -> None:
        if not self.has_asked:
            self.has_asked = True
            self.recipe.release()

    def __del__(self) -> None:
        self._release()  # backward may never ask, for parameters that are not on its path


class _Made:
    """An output of an op, as long as autograd may still save it."""

    __slots__ = ("index", "num_bytes", "recipe", "storage", "version")

    def __init__(self, recipe: _Recipe, index: int, output: Tensor) -> None:
        self.recipe = recipe
        self.index = index
        storage = output.untyped_storage()
        # While it exists, no other storage has this one's address, even after this one's memory was freed.
        self.storage = StorageWeakRef(storage)
        self.version = output._version
        self.num_bytes = storage.nbytes()


class CheapTensors:
    """Decides for each tensor that autograd saves in one run of a layer whether to keep it or how to make it.

    Args:
        device_type: Of the layer; where it runs under autocast, the casts of outputs are made again too.
        detaches: Whether what is kept must not keep the graph that it is part of.
        drops: False only counts what could be dropped, and keeps it.
    """

    def __init__(self, device_type: str, detaches: bool = False, drops: bool = True) -> None:
        self.dropped_bytes = 0
        """Bytes of the outputs that were not kept, or need not be, so far."""
        self._made: dict[int, _Made] = {}
        self._by_node: dict[Any, _Made] | None = {} if torch.is_autocast_enabled(device_type) else None
        self._dropped: set[int] = set()
        self._detaches = detaches
        self._drops = drops

    def listener(
        self, outputs: tuple[Tensor, ...], function: Callable[..., Any], args: Sequence[Any], keeps_inputs: bool
    ) -> None:
        """Notes how ``outputs`` were made, if their inputs are in memory until backward anyway."""
        if not outputs[0].requires_grad or not all(_owns_memory(output) for output in outputs):
            return
        kept: list[Any] = []
        for arg in args:
            found = self._find(arg) if isinstance(arg, Tensor) else None
            if found is None and isinstance(arg, Tensor):
                if type(arg) not in _PLAIN or (arg.requires_grad and not keeps_inputs):
                    return
                kept.append(self._keep(arg))
            else:
                kept.append(arg if found is None else Recomputed(found.recipe, found.index, arg))
        self._note(outputs, _Recipe(outputs, function, kept))

    def _note(self, outputs: Sequence[Tensor], recipe: _Recipe) -> list[_Made]:
        notes = [_Made(recipe, index, output) for index, output in enumerate(outputs)]
        for output, made in zip(outputs, notes, strict=True):
            self._made[made.storage.cdata] = made
            if self._by_node is not None:
                self._by_node[output.grad_fn] = made
        return notes

    def _find(self, tensor: Tensor) -> _Made | None:
        """The output that ``tensor`` is, or is a view of; None if it is none, or one that was written to since."""
        if tensor.is_leaf or type(tensor) is not Tensor or tensor.layout is not torch.strided or not self._made:
            return None
        made = self._made.get(tensor.untyped_storage()._cdata)
        if made is None:
            made = self._find_cast(tensor) if self._by_node else None
        elif tensor._version != made.version or tensor.dtype != made.recipe.layouts[made.index][2]:
            return None
        return made

    def _find_cast(self, tensor: Tensor) -> _Made | None:
        """The same for a cast of an output, which autocast makes for each linear layer anew."""
        node: Any = tensor.grad_fn
        for _ in range(4):
            if node is None or node.name() not in _VIEWS:
                break
            node = node.next_functions[0][0]
        if node is None or node.name() != _CAST or self._by_node is None or tensor._version:
            return None
        source = self._by_node.get(node.next_functions[0][0])
        if source is None:
            return None
        layout = source.recipe.layouts[source.index]
        whole = torch.empty_strided(layout[0], layout[1], dtype=tensor.dtype, device="meta")
        if tensor.untyped_storage().nbytes() != whole.untyped_storage().nbytes():
            return None  # the cast changed the layout
        recipe = _Recipe((whole,), torch.Tensor.to, (_whole(source), tensor.dtype))
        made = _Made(recipe, 0, tensor)
        self._made[made.storage.cdata] = made
        return made

    def pack(self, tensor: Tensor) -> Any:
        """What to save in the place of ``tensor``; :func:`unpack` gives the tensor back."""
        if type(tensor) not in _PLAIN:
            return tensor
        made = self._find(tensor)
        if made is None:
            return self._keep(tensor)
        if made.storage.cdata not in self._dropped:
            self._dropped.add(made.storage.cdata)
            self.dropped_bytes += made.num_bytes
        return Recomputed(made.recipe, made.index, tensor) if self._drops else self._keep(tensor)

    def _keep(self, tensor: Tensor) -> Kept:
        return Kept(tensor.detach() if self._detaches and not tensor.is_leaf else tensor)

    def close(self) -> None:
        """Forgets what was noted: the layer has run, what it saved is saved."""
        self._made.clear()
        if self._by_node:
            self._by_node.clear()


def unpack(packed: Any) -> Tensor:
    """The tensor that :meth:`CheapTensors.pack` was given."""
    return packed.get() if isinstance(packed, Kept | Recomputed) else packed


def _owns_memory(output: Tensor) -> bool:
    if type(output) is not Tensor or output.storage_offset():
        return False
    return output.untyped_storage().nbytes() == output.numel() * output.element_size() != 0


def _whole(made: _Made) -> Recomputed:
    size, stride, _ = made.recipe.layouts[made.index]
    return Recomputed(made.recipe, made.index, torch.empty_strided(size, stride, device="meta"))
