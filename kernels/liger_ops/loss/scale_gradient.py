"""Product of the upstream gradient and a gradient that was computed in forward, together with its loss."""

import torch
import triton.language as tl
from torch import Tensor

from liger_ops import backend

_BLOCK_SIZE = 8192
_PROGRAMS_PER_MULTIPROCESSOR = 4


@backend.Kernel
def _scale_kernel(
    gradient_ptr,  # [numel]
    factor_ptr,  # [], float32
    scaled_ptr,  # [numel], may be gradient_ptr
    numel,
    IN_PLACE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program multiplies every num_programs-th block in float32 and rounds once; in place, 1 is skipped."""
    factor = tl.load(factor_ptr).to(tl.float32)
    end = numel
    if IN_PLACE:
        end = tl.where(factor == 1.0, 0, numel)
    step = tl.num_programs(0).to(tl.int64) * BLOCK_SIZE
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK_SIZE, end, step):
        offsets = start + tl.arange(0, BLOCK_SIZE)
        mask = offsets < numel
        gradient = tl.load(gradient_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + offsets, (gradient * factor).to(scaled_ptr.dtype.element_ty), mask=mask)


def _launch(gradient: Tensor, factor: Tensor, scaled: Tensor) -> Tensor:
    if not backend.use_triton(gradient):
        # With a dimension, or PyTorch would cast the factor to the gradient's dtype before it multiplies.
        return torch.mul(gradient, factor.reshape(1), out=scaled)
    if gradient.numel():
        num_programs = _PROGRAMS_PER_MULTIPROCESSOR * backend.hardware(gradient.device).multiprocessors
        _scale_kernel.launch(
            min(-(-gradient.numel() // _BLOCK_SIZE), num_programs),
            gradient_ptr=gradient,
            factor_ptr=factor,
            scaled_ptr=scaled,
            numel=gradient.numel(),
            IN_PLACE=scaled is gradient,
            BLOCK_SIZE=_BLOCK_SIZE,
            num_warps=8,
        )
    return scaled


@backend.register_op("scale_gradient", fake=lambda gradient, factor, dtype: torch.empty_like(gradient, dtype=dtype))
def _scale_gradient(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return _launch(gradient, factor, torch.empty_like(gradient, dtype=dtype))


def scale_gradient(gradient: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
    """``gradient * factor`` in ``dtype``, multiplied in float32 (or float64) and rounded once.

    Args:
        gradient: Contiguous; overwritten if ``in_place`` and already of ``dtype``.
        factor: A scalar, at least float32.
        dtype: Of the result.
        in_place: Whether ``gradient`` may be overwritten because it is not used again.
    """
    if in_place and gradient.dtype == dtype:
        return gradient if gradient.is_meta else _launch(gradient, factor, gradient)
    return _scale_gradient(gradient, factor, dtype)
