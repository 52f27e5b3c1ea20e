"""What is between the two products of an expert: the activation of the gate, times the up projection."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops.arguments import check_bool, check_choice, check_number
from liger_ops.gated_linear_unit import ACTIVATIONS, activate


class Gate(NamedTuple):
    """``activation(gate) * (up + up_offset)``, of clamped values if there is a limit.

    gpt-oss has ``limit=7, alpha=1.702, up_offset=1``.
    """

    activation: str = "silu"
    """"silu", "gelu", "gelu_tanh" or "relu_squared"."""
    limit: float | None = None
    """The gate is at most this, and up between minus this and this."""
    alpha: float = 1.0
    """``silu(gate)`` is ``gate * sigmoid(alpha * gate)``."""
    up_offset: float = 0.0
    limit_output: bool = False
    """Whether the limit is one of the activation's value, not of the gate."""

    def check(self) -> None:
        check_choice("activation", self.activation, ACTIVATIONS)
        check_number("limit", self.limit, above=0, optional=True)
        check_number("alpha", self.alpha)
        check_number("up_offset", self.up_offset)
        check_bool("limit_output", self.limit_output)

    @property
    def constants(self) -> dict[str, object]:
        """Arguments of the kernels."""
        limit_kind = 0 if self.limit is None else 2 if self.limit_output else 1
        constants = float(self.limit or 0.0), float(self.alpha), float(self.up_offset)
        return {"constants": constants, "ACTIVATION": self.activation, "LIMIT": limit_kind}

    def reference(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """In float32 or wider, not rounded."""
        wide = torch.promote_types(gate.dtype, torch.float32)
        gate = gate.to(wide)
        if self.limit is not None and not self.limit_output:
            gate = gate.clamp(max=self.limit)
        if self.activation == "silu" and self.alpha != 1.0:
            value = gate * torch.sigmoid(gate * self.alpha)
        else:
            value = ACTIVATIONS[self.activation](gate)
        if self.limit is not None and self.limit_output:
            value = value.clamp(max=self.limit)
        if up is None:
            return value
        up = up.to(wide)
        if self.limit is not None:
            up = up.clamp(-self.limit, self.limit)
        return value * (up + self.up_offset if self.up_offset else up)


@triton.jit
def gate_values(gate, up, constants, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, HALF: tl.constexpr):
    """The product, and its derivatives by gate and up, in float32. ``up`` is None for a gate alone."""
    limit, alpha, up_offset = constants
    limited = gate
    if LIMIT == 1:
        limited = tl.where(gate > limit, limit, gate)  # NaN stays NaN
    if ACTIVATION == "silu":
        scaled = limited * alpha
        sigmoid = tl.sigmoid(scaled)
        value = limited * sigmoid
        slope = sigmoid * (1.0 + scaled * (1.0 - sigmoid))
    else:
        value, slope = activate(limited, ACTIVATION, HALF)
    if LIMIT == 1:
        slope = tl.where(gate > limit, 0.0, slope)
    if LIMIT == 2:
        slope = tl.where(value > limit, 0.0, slope)
        value = tl.where(value > limit, limit, value)
    if up is None:
        product, by_up = value, value
    else:
        factor = up
        by_up = value
        if LIMIT > 0:
            factor = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
            by_up = tl.where((up > limit) | (up < -limit), 0.0, value)
        factor += up_offset
        product = value * factor
        slope = slope * factor
    return product, slope, by_up
