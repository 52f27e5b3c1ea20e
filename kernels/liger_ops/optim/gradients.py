"""The norm of many tensors, and their scaling, in one launch each: clipping at memory bandwidth.

PyTorch rounds the norm of each tensor to its dtype, and scaling reads and writes gradients that need none, by 1. Here
norms are float32, and a factor of 1, which only the device knows, is skipped there.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from liger_ops import backend

_CHUNK, _BLOCK_SIZE, _NUM_WARPS = 2**16, 2048, 8
_POINTED = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _chunk_of(addresses_ptr, sizes_ptr, owners_ptr, firsts_ptr, DTYPE: tl.constexpr, CHUNK: tl.constexpr):
    """Where this program's chunk of one tensor starts in memory, and its number of elements."""
    chunk = tl.program_id(0)
    owner = tl.load(owners_ptr + chunk)
    start = (chunk - tl.load(firsts_ptr + owner)).to(tl.int64) * CHUNK
    data_ptr = tl.load(addresses_ptr + owner).to(tl.pointer_type(DTYPE))
    data_ptr = tl.multiple_of(data_ptr, 16)  # so that loads are wide
    return data_ptr + start, tl.minimum(tl.load(sizes_ptr + owner) - start, CHUNK).to(tl.int32)


@backend.Kernel
def _square_sums_kernel(
    sums_ptr,  # [num_chunks], float32
    addresses_ptr,  # [num_tensors], int64, multiples of 16
    sizes_ptr,  # [num_tensors], int64
    owners_ptr,  # [num_chunks], int32: the tensor of each chunk
    firsts_ptr,  # [num_tensors], int32: the first chunk of each tensor
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program adds up the squares of a chunk."""
    data_ptr, size = _chunk_of(addresses_ptr, sizes_ptr, owners_ptr, firsts_ptr, DTYPE, CHUNK)
    columns = tl.arange(0, BLOCK_SIZE)
    sums = tl.zeros([BLOCK_SIZE], tl.float32)
    num_whole = size // BLOCK_SIZE * BLOCK_SIZE
    for start in range(0, num_whole, BLOCK_SIZE):  # without a mask, which would make loads narrow
        block = tl.load(data_ptr + start + columns).to(tl.float32)
        sums += block * block
    if num_whole < size:
        block = tl.load(data_ptr + num_whole + columns, mask=num_whole + columns < size, other=0.0).to(tl.float32)
        sums += block * block
    tl.store(sums_ptr + tl.program_id(0), tl.sum(sums))


@backend.Kernel
def _multiply_kernel(
    factor_ptr,  # [], float32
    addresses_ptr,  # as above, like the next
    sizes_ptr,
    owners_ptr,
    firsts_ptr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program multiplies a chunk in float32, unless by 1."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        data_ptr, size = _chunk_of(addresses_ptr, sizes_ptr, owners_ptr, firsts_ptr, DTYPE, CHUNK)
        columns = tl.arange(0, BLOCK_SIZE)
        num_whole = size // BLOCK_SIZE * BLOCK_SIZE
        for start in range(0, num_whole, BLOCK_SIZE):
            block = tl.load(data_ptr + start + columns).to(tl.float32)
            tl.store(data_ptr + start + columns, (block * factor).to(DTYPE))
        if num_whole < size:
            mask = num_whole + columns < size
            block = tl.load(data_ptr + num_whole + columns, mask=mask).to(tl.float32)
            tl.store(data_ptr + num_whole + columns, (block * factor).to(DTYPE), mask=mask)


@functools.lru_cache(maxsize=64)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """The sizes, the owners and the first chunks, as kernels read them."""
    with torch.device("cpu"):
        counts = torch.tensor([triton.cdiv(size, _CHUNK) for size in sizes])
        owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(counts)
        found = torch.tensor(sizes), owners, (counts.cumsum(0) - counts).int()
    return tuple(each.to(device) for each in found)


def _launch(kernel: backend.Kernel, tensors: Sequence[Tensor], factor: Tensor | None = None) -> Tensor:
    """Launches a kernel on tensors of one dtype and device; returns the sums, or the factor."""
    first = tensors[0]
    sizes, owners, firsts = _chunks(tuple([each.numel() for each in tensors]), first.device)
    # From pinned memory the host does not wait for the copy.
    addresses = [each.data_ptr() for each in tensors]
    on_host = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=first.is_cuda)
    written = first.new_empty(len(owners), dtype=torch.float32) if factor is None else factor
    kernel.launch(
        len(owners),
        num_warps=_NUM_WARPS,
        **{"sums_ptr" if factor is None else "factor_ptr": written},
        addresses_ptr=on_host.to(first.device, non_blocking=True),
        sizes_ptr=sizes,
        owners_ptr=owners,
        firsts_ptr=firsts,
        DTYPE=_POINTED[first.dtype],
        CHUNK=_CHUNK,
        BLOCK_SIZE=_BLOCK_SIZE,
    )
    return written


def _split(tensors: Sequence[Tensor]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Tensors that kernels take, by their dtype and device, and the others; empty ones are in neither."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    others: list[Tensor] = []
    is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()  # with its copies
    for tensor in tensors:
        is_plain = tensor.dtype in _POINTED and tensor.layout is torch.strided and tensor.is_contiguous()
        is_ready = is_plain and not is_captured and backend.runs_directly(tensor) and backend.use_triton(tensor)
        if is_ready and tensor.data_ptr() % 16 == 0:
            if tensor.numel():
                alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        else:
            others.append(tensor)
    return list(alike.values()), others


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor], device: torch.device, norm_type: float = 2.0) -> Tensor:
    """The p-norm of all numbers of dense or sparse tensors, on ``device``, which is not waited for; 0 of none.

    A scalar in float32, or in float64 if a tensor is. Kernels compute 2-norms.
    """
    alike, others = _split(tensors) if norm_type == 2.0 else ([], list(tensors))
    norms = [_launch(_square_sums_kernel, each).sum().sqrt() for each in alike]
    for tensor in others:
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        values = values.abs() if values.is_complex() else values
        dtype = torch.promote_types(values.dtype, torch.float32)
        if values.numel():  # none has no largest number
            norms.append(torch.linalg.vector_norm(values, norm_type, dtype=dtype))
    if not norms:
        return torch.zeros((), device=device)
    found = [norm.to(device) for norm in norms]
    if len({norm.dtype for norm in found}) > 1:
        found = [norm.double() for norm in found]
    return found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found), norm_type)


@torch.no_grad()
def multiply_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies tensors in place by a scalar of at least float32, in which kernels multiply and round once."""
    alike, others = _split(tensors)
    for each in alike:
        _launch(_multiply_kernel, each, factor.to(each[0].device, torch.float32))
        increment_version(each)
    for tensor in others:
        tensor.mul_(factor.to(tensor.device))
