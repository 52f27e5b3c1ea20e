"""The norm of many tensors, and their scaling, in one launch each: clipping at memory bandwidth.

PyTorch rounds the norm of each tensor to its dtype, and scaling reads and writes gradients that need none, by 1. Here
norms are float32, and a factor of 1, which only the device knows, is skipped there.
"""

import functools
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

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


class Batch:
    """Dense or sparse tensors, of which kernels take those that are contiguous, aligned and on a GPU."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._alike: dict[Any, list[Tensor]] = {}
        self._others: list[Tensor] = []
        self._known: dict[Any, dict[str, Any]] = {}
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()  # with its copies
        runs_now = not is_captured and not backend.is_traced()
        launches: dict[Any, bool] = {}
        for each in tensors:
            is_plain = type(each) is Tensor and each.layout is torch.strided and each.is_contiguous()
            kind = each.dtype, each.get_device()
            if kind not in launches:
                launches[kind] = runs_now and each.dtype in _POINTED and not each.is_meta and backend.use_triton(each)
            if is_plain and launches[kind] and not each.data_ptr() & 15:
                if each.numel():
                    self._alike.setdefault(kind, []).append(each)
            else:
                self._others.append(each)

    def _arguments(self, kind: Any) -> dict[str, Any]:
        """What a launch on the tensors of one dtype and device tells of them; made once."""
        if kind not in self._known:
            tensors = self._alike[kind]
            first = tensors[0]
            # From pinned memory the host does not wait for the copy.
            addresses, pin = [each.data_ptr() for each in tensors], first.is_cuda
            on_host = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=pin)
            sizes, owners, firsts = _chunks(tuple([each.numel() for each in tensors]), first.device)
            self._known[kind] = {
                "num_programs": len(owners),
                "num_warps": _NUM_WARPS,
                "addresses_ptr": on_host.to(first.device, non_blocking=True),
                "sizes_ptr": sizes,
                "owners_ptr": owners,
                "firsts_ptr": firsts,
                "DTYPE": _POINTED[first.dtype],
                "CHUNK": _CHUNK,
                "BLOCK_SIZE": _BLOCK_SIZE,
            }
        return self._known[kind]

    def _square_sum(self, kind: Any) -> Tensor:
        arguments = self._arguments(kind)
        sums = torch.empty_like(arguments["owners_ptr"], dtype=torch.float32)
        _square_sums_kernel.launch(sums_ptr=sums, **arguments)
        return sums.sum()

    def _multiply(self, kind: Any, factor: Tensor) -> None:
        _multiply_kernel.launch(factor_ptr=factor, **self._arguments(kind))

    @torch.no_grad()
    def norm(self, device: torch.device, norm_type: float = 2.0) -> Tensor:
        """The p-norm of all numbers, on ``device``, which is not waited for; 0 of none.

        A scalar in float32, or in float64 if a tensor is. Kernels compute 2-norms.
        """
        norms, others = [], self._others
        if norm_type == 2.0:
            norms = [self._square_sum(kind).sqrt() for kind in self._alike]
        else:
            others = [*others, *chain.from_iterable(self._alike.values())]
        for tensor in others:
            values = tensor.coalesce().values() if tensor.is_sparse else tensor
            values = values.abs() if values.is_complex() else values
            if values.numel():  # none has no largest number
                dtype = torch.promote_types(values.dtype, torch.float32)
                norms.append(torch.linalg.vector_norm(values, norm_type, dtype=dtype))
        return joined_norm([norm.to(device) for norm in norms], norm_type) if norms else torch.zeros((), device=device)

    @torch.no_grad()
    def multiply_(self, factor: Tensor) -> None:
        """Multiplies in place by a scalar of at least float32, in which kernels multiply and round once."""
        for kind, tensors in self._alike.items():
            self._multiply(kind, factor.to(tensors[0].device, torch.float32))
            increment_version(tensors)
        for tensor in self._others:
            tensor.mul_(factor.to(tensor.device))


def joined_norm(norms: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The p-norm of all numbers of parts with these norms, on one device; at least one."""
    if len(norms) == 1:
        return norms[0]
    wide = [norm.double() for norm in norms] if len({norm.dtype for norm in norms}) > 1 else norms
    return torch.linalg.vector_norm(torch.stack(list(wide)), norm_type)
