"""Corrections of Triton's interpreter, for tests that run kernels on CPUs."""

import functools
import inspect
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_create_splat, _create_dot = InterpreterBuilder.create_splat, InterpreterBuilder.create_dot


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
def _names_of_builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def patch_builtins_found_once(package: Any, *arguments: Any) -> None:
    """Replaces ``_patch_builtin``, which searches all of ``triton.language`` whenever a kernel calls a function."""
    for name in _names_of_builtins(package):
        member = getattr(package, name)
        if not tl.core.is_builtin(member):  # nor are the others, as the kernel that calls has replaced them
            return
        interpreter._patch_attr(package, name, member, *arguments)


def begin_rank(device: str) -> int:
    """Makes a process of a distributed test ready for kernels on ``"cpu"`` or ``"cuda"``; returns its rank."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group({"cuda": "nccl"}.get(device, "gloo"))
    interpreter.InterpreterBuilder.create_splat = splat_that_keeps_booleans
    interpreter._patch_builtin = patch_builtins_found_once
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    return rank
