"""Products of payloads: PyTorch's scaled matrix product, and the same in float32 for devices that have none.

Both operands lie with the summed dimension last in memory, as Hopper's tensor cores read float8.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_ops.fp8.rows import ones

MULTIPLE = 16
"""Of the summed dimension and of the second operand's rows."""
_MAX_FAST_ACCUM = 8192
"""Longer sums take as long without fast accumulation."""


class Float8Options(NamedTuple):
    """How linear layers multiply.

    Fast accumulation keeps partial sums in the tensor cores' short accumulators (14 bits), which cut off what does not
    fit; without it they are added in float32 every 128 elements. Of sums whose terms have one sign it loses 0.6% of
    4,096 terms and 3.7% of 16,384, on an H200; of random signs nothing that counts.
    """

    fast_accum: tuple[bool, bool, bool] = (True, False, False)
    """Of the output, if it sums at most 8192 terms, the gradient of the input and that of the weight."""
    high_precision_wgrad: bool = False
    """Whether weights' gradients are products of the unquantized tensors."""
    save_payloads: bool = False
    """Whether a gated MLP keeps gate and up in float8 for backward."""
    emulate: bool = False
    """Whether products run in float32, on any device."""

    def of_product(self, place: int, num_terms: int = 0) -> dict[str, Any]:
        """How to multiply for the output (place 0), of so many terms, the gradient of the input or of the weight."""
        return {"fast_accum": self.fast_accum[place] and num_terms <= _MAX_FAST_ACCUM, "emulate": self.emulate}


DEFAULT_OPTIONS = Float8Options()


def unsupported(device: torch.device) -> str | None:
    """Why a device has no float8 products; None if it has them, or emulates them, as CPUs do."""
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return "AMD GPUs are untested"
    capability = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if capability < (8, 9):
        return f"{name} has compute capability {capability[0]}.{capability[1]}, float8 products need 8.9 or more"
    if tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2])) < (12, 9):
        return f"PyTorch was built for CUDA {torch.version.cuda}, products with a scale per row need 12.9 or more"
    return None


def scaled_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor | None,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype,
    fast_accum: bool,
    emulate: bool,
) -> Tensor:
    """``(a * a_scale[:, None]) @ (b * b_scale[:, None]).t() + bias`` of payloads.

    Args:
        a: ``[M, K]`` in e4m3.
        b: ``[N, K]`` in e4m3; N and K are multiples of 16.
        a_scale, b_scale: ``[M]`` and ``[N]``, float32; no ``b_scale`` stands for ones.
        bias: ``[N]``.
        dtype: Of the result.
        fast_accum, emulate: See :class:`Float8Options`.

    Returns:
        ``[M, N]``.
    """
    if emulate or not (a.is_cuda or a.is_meta):
        y = (a.float() @ b.float().t()) * a_scale[:, None]
        y = y if b_scale is None else y * b_scale
        return (y if bias is None else y + bias.float()).to(dtype)
    if b_scale is None:
        b_scale = ones(b.shape[0], b.device)
    args: tuple[Any, ...] = a, b.t(), a_scale[:, None], b_scale[None, :]
    fused_bias = bias if bias is not None and bias.dtype == dtype != torch.float32 else None
    y = torch.ops.aten._scaled_mm(*args, fused_bias, None, dtype, fast_accum)
    return y if bias is None or fused_bias is not None else y + bias.to(dtype)
