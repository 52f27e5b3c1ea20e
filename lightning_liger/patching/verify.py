"""Compares a replacement's outputs and gradients with the original's on a small random input."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

TOLERANCE_ULPS = 16
"""Allowed error in units of ``finfo(dtype).eps`` times the largest value: both sides round, in different orders."""


class Mismatch(Exception):
    """Raised for a replacement that differs from the original; the message says how."""


class Rejected(Mismatch):
    """Raised for a forward that does not take the input: it lacks the structure that its rule assumed."""


_REJECTIONS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
# Those that have no class of their own: of drivers and libraries, and of an allocation in CPU memory.
_DEVICE_MESSAGE = re.compile(
    r"\b(CUDA|HIP|XPU|MPS|cuDNN|NCCL|Triton)\b.{0,20}\berror\b|_STATUS_|out of memory|(allocate|enough) memory",
    re.IGNORECASE,
)


@contextmanager
def trial() -> Iterator[None]:
    """Raises :class:`Rejected` for errors that come from the module that is tried; others, as of the device, pass."""
    try:
        yield
    except Mismatch:
        raise
    except _REJECTIONS as error:
        if isinstance(error, _DEVICE_ERRORS) or _DEVICE_MESSAGE.search(str(error)):
            raise
        raise Rejected(str(error) or type(error).__name__) from error


def compare(
    original: Callable[[], Tensor | Sequence[Tensor]],
    replacement: Callable[[], Tensor | Sequence[Tensor]],
    differentiate: Iterable[Tensor],
) -> float:
    """Runs both; returns the largest difference of outputs and gradients of some leaves, relative to the largest value.

    Without leaves they run without gradients.

    Raises a :class:`Mismatch` if a shape, a dtype or a value differs by more than rounding.
    """
    leaves = list(differentiate)
    expected, actual = _run(original, leaves), _run(replacement, leaves)
    if len(expected) != len(actual):
        raise Mismatch(f"{len(actual) - len(leaves)} outputs, the original has {len(expected) - len(leaves)}")
    worst = 0.0
    for index, (want, got) in enumerate(zip(expected, actual, strict=True)):
        name = "output" if index < len(expected) - len(leaves) else "gradient"
        if want.shape != got.shape or want.dtype != got.dtype:
            raise Mismatch(f"{name} is {got.dtype} {tuple(got.shape)}, the original's {want.dtype} {tuple(want.shape)}")
        scale = want.double().abs().max().item() or 1.0
        error = (want.double() - got.double()).abs().max().item() / scale
        lowest = min((leaf.dtype for leaf in (*leaves, want)), key=lambda dtype: -torch.finfo(dtype).eps)
        if not error <= TOLERANCE_ULPS * torch.finfo(lowest).eps:
            raise Mismatch(f"{name} differs by {error:.1e} of its largest value")
        worst = max(worst, error)
    return worst


def _run(function: Callable[[], Tensor | Sequence[Tensor]], leaves: list[Tensor]) -> list[Tensor]:
    # Both draw the same numbers from the global random state, such as a dropout's, and leave it as it was.
    devices = {leaf.device.index for leaf in leaves if leaf.device.type == "cuda"}
    with torch.random.fork_rng(devices), torch.set_grad_enabled(bool(leaves)):
        outputs = function()
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if not leaves:
            return outputs
        losses = []
        for each in outputs:  # a different weight for each element, so that a wrong order of elements is detected
            weights = torch.linspace(-1.0, 1.0, each.numel(), dtype=torch.float64, device=each.device)
            losses.append((each.double() * weights.view(each.shape)).sum())
        gradients = torch.autograd.grad(torch.stack(losses).sum(), leaves)
    return [*(output.detach() for output in outputs), *gradients]
