"""The one yardstick of the kernel tests: no further from float64 than plain PyTorch in the same dtype; and draws."""

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ["contiguous", "transposed", "sliced", "spaced", "expanded"]


def few(max_examples: int) -> settings:
    """So many random examples, always the same and small as they are; the fixtures of a device hold no state."""
    return settings(
        derandomize=True, max_examples=max_examples, deadline=None, phases=[Phase.generate], database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )  # fmt: skip


def assert_as_accurate(
    name: str, actual: Tensor, eager: Tensor, truth: Tensor, *, factor: float = 2.0, magnitude: float = 0.0
) -> None:
    """Fails if ``actual`` is further from ``truth`` than ``factor`` times eager's largest error plus rounding.

    Args:
        name: What is compared, for the message.
        actual: The kernel's result.
        eager: What plain PyTorch gives in the tested dtype.
        truth: The same computed in float64 from the same rounded inputs.
        factor: How many times eager's error is allowed.
        magnitude: Of what the result is a difference of, whose rounding it cannot be without.
    """
    if actual.shape != truth.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}")
    if actual.numel() == 0:
        return
    truth = truth.double().cpu()
    error = (actual.detach().double().cpu() - truth).abs().max().item()
    eager_error = (eager.detach().double().cpu() - truth).abs().max().item()
    rounding = 2 * torch.finfo(actual.dtype).eps * max(magnitude, truth.abs().max().item())
    allowed = factor * eager_error + rounding
    if not error <= allowed:  # also catches NaN
        raise AssertionError(f"{name}: error {error:.3e}, eager's {eager_error:.3e}, allowed {allowed:.3e}")


def lay_out(x: Tensor, layout: str) -> Tensor:
    """A tensor of the same shape and, unless expanded, of the same values."""
    if x.dim() == 0 or layout == "contiguous":
        return x.contiguous()
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":  # also starts at an odd address
        return F.pad(x, (1, 2))[..., 1:-2]
    if layout == "spaced":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    return x[:1].expand(x.shape)
