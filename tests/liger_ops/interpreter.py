"""Corrections of Triton's interpreter, for tests that run kernels on CPUs."""

import functools
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_create_splat, _create_dot = InterpreterBuilder.create_splat, InterpreterBuilder.create_dot
_patch_lang, _begin_block_type = interpreter._patch_lang, tl.block_type.__init__


def splat_that_keeps_booleans(builder: Any, block_type: Any, scalar: TensorHandle) -> TensorHandle:
    """Replaces ``InterpreterBuilder.create_splat``, which makes integers of booleans; Triton 3.9 refuses such masks."""
    splat = _create_splat(builder, block_type, scalar)
    if scalar.data.dtype == bool:
        splat.data = splat.data.astype(bool)
    return splat


def dot_of_bfloat16(builder: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *others: Any) -> TensorHandle:
    """Replaces ``InterpreterBuilder.create_dot``, which multiplies the bits of bfloat16 as if they were integers."""
    wide = [
        TensorHandle((each.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if each.dtype.scalar == tl.bfloat16
        else each
        for each in (a, b)
    ]
    return _create_dot(builder, *wide, d, *others)


@functools.cache
def patch_language_once(function: Any) -> Any:
    """Replaces ``_patch_lang``, which patches ``triton.language`` at each launch and each call between kernels."""
    _patch_lang(function)
    return SimpleNamespace(restore=lambda: None)


_dtype_of_scalars = functools.cache(interpreter._get_np_dtype)


def dtype_of_numpy(dtype: Any) -> np.dtype:
    """Replaces ``_get_np_dtype``, which makes a table of all dtypes at each call."""
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else _dtype_of_scalars(dtype.scalar)


def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Replaces ``_patch_attr``, whose functions sort their keywords twice before they do anything."""
    function = getattr(member, "__wrapped__", member)  # without the check that it is called from a kernel

    def patched(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

    scope.set_attr(owner, name, patched)


@functools.cache
def _sizes(sizes: tuple[int, ...]) -> tuple[Any, int, Any, Any]:
    """Shape and number of elements of a type, and the same of a tensor."""
    made = SimpleNamespace()
    _begin_block_type(made, tl.int32, list(sizes))
    return made.shape, made.numel, tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(made.numel)


def begin_block_type(block_type: Any, element_type: Any, shape: Any) -> None:
    """Replaces ``block_type.__init__``, which checks each shape and writes its name each time."""
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in getattr(shape, "values", shape))
    block_type.element_ty, (block_type.shape, block_type.numel, *block_type.of_tensor) = element_type, _sizes(sizes)
    block_type.name = f"<{sizes}, {element_type.name}>"


def begin_tensor(tensor: Any, handle: Any, type: Any) -> None:
    """Replaces ``tensor.__init__``, which makes constants of the sizes each time."""
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.shape, tensor.numel = type.of_tensor if type.is_block() else _NO_SIZES


_NO_SIZES = tl.tuple([]), tl.constexpr(1)


def begin_handle(handle: Any, data: np.ndarray, dtype: Any, attr: Any = None) -> None:
    """Replaces ``TensorHandle.__init__``, which compares sizes with more calls."""
    handle.data, handle.dtype, handle.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > 1 and not dtype.is_ptr() and data.itemsize * 8 > dtype.primitive_bitwidth:
        raise ValueError(f"{data.dtype} cannot be {dtype}")


def broadcast(semantic: Any, lhs: Any, rhs: Any) -> Any:
    """Replaces ``broadcast_impl_value``, which compares equal shapes size for size, for these."""
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast(semantic, lhs, rhs)


_broadcast = TritonSemantic.broadcast_impl_value


CORRECTIONS = [
    (InterpreterBuilder, "create_splat", splat_that_keeps_booleans),
    (InterpreterBuilder, "create_dot", dot_of_bfloat16),
    (interpreter, "_patch_lang", patch_language_once),
    (interpreter, "_patch_attr", patch_attribute),
    (interpreter, "_get_np_dtype", dtype_of_numpy),
    # Sums of indices are not compared with the largest integer: it is far from those of tests.
    (interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False)),
    (tl.block_type, "__init__", begin_block_type),
    (tl.tensor, "__init__", begin_tensor),
    (TensorHandle, "__init__", begin_handle),
    (TritonSemantic, "broadcast_impl_value", broadcast),
]
"""Owner, name and new value of what is replaced."""


def begin_rank(device: str) -> int:
    """Makes a process of a distributed test ready for kernels on ``"cpu"`` or ``"cuda"``; returns its rank."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group({"cuda": "nccl"}.get(device, "gloo"))
    for correction in CORRECTIONS:
        setattr(*correction)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    return rank
