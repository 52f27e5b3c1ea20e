"""Compares a replacement's outputs and gradients with the original's on a small random input."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

TOLERANCE_ULPS = 16
"""Allowed error in units of ``finfo(dtype).eps`` times the largest value: both sides round, in different orders."""


class Mismatch(Exception):
    """Raised for a replacement that differs from the original; the message says how."""


PROBE_ERRORS = (
    Mismatch,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that mean "not the same": a forward that rejects the input lacks the structure that its rule assumed."""


def random_like(reference: Tensor, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random values of ``reference``'s shape that require a gradient; the global random state does not change."""
    # On the CPU, where the generator is, also inside a torch.device context such as configure_model's.
    values = torch.randn(reference.shape, generator=generator, dtype=torch.float32, device="cpu")
    return values.to(dtype=dtype, device=device).requires_grad_()


def compare(
    original: Callable[[], Tensor | Sequence[Tensor]],
    replacement: Callable[[], Tensor | Sequence[Tensor]],
    differentiate: Iterable[Tensor],
) -> float:
    """Runs both and returns the largest difference of outputs and gradients, relative to the largest value.

    Args:
        original: Computes the original's output or outputs.
        replacement: Computes the replacement's.
        differentiate: The leaf tensors whose gradients are compared.

    Raises:
        Mismatch: If a shape, a dtype or a value differs by more than rounding.
    """
    leaves = list(differentiate)
    # A dropout in the original draws from the global random state.
    with torch.random.fork_rng({leaf.device.index for leaf in leaves if leaf.device.type == "cuda"}):
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
    with torch.enable_grad():
        outputs = function()
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        # A different weight for each element, so that a wrong order of elements is detected.
        loss = torch.stack([(output.double() * _weights(output)).sum() for output in outputs]).sum()
        gradients = torch.autograd.grad(loss, leaves)
    return [*(output.detach() for output in outputs), *gradients]


def _weights(output: Tensor) -> Tensor:
    return torch.linspace(-1.0, 1.0, output.numel(), dtype=torch.float64, device=output.device).view(output.shape)
