"""Corrections of Triton's interpreter, for tests that run kernels on CPUs."""

import functools
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_create_splat, _create_dot = InterpreterBuilder.create_splat, InterpreterBuilder.create_dot
_patch_lang = interpreter._patch_lang


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


CORRECTIONS = [
    (InterpreterBuilder, "create_splat", splat_that_keeps_booleans),
    (InterpreterBuilder, "create_dot", dot_of_bfloat16),
    (interpreter, "_patch_lang", patch_language_once),
    (interpreter, "_get_np_dtype", dtype_of_numpy),
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
