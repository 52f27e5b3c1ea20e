"""What the tests of rules share: modules in one line, a patched copy, and the comparison with the original."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_liger import apply_liger_kernels
from lightning_liger.patching import PatchEntry
from lightning_liger.patching.rules.base import Patched
from lightning_liger.patching.verify import TOLERANCE_ULPS


def written(forward: Callable[[Any, Tensor], Any], name: str = "Written", **attributes: Any) -> nn.Module:
    """A module with this forward and these attributes; an int or a tuple is the shape of a random parameter."""
    module = type(name, (nn.Module,), {"forward": forward})()
    for attribute, value in attributes.items():
        is_shape = type(value) in (int, tuple)
        setattr(module, attribute, nn.Parameter(torch.randn(value)) if is_shape else value)
    return module


def patched_twin(module: nn.Module) -> tuple[nn.Module, PatchEntry]:
    """A copy of ``module`` after patching, and what the report says of it."""
    twin = copy.deepcopy(module)
    entries = apply_liger_kernels(twin).entries
    (entry,) = [entry for entry in entries if entry.structure == type(module).__name__]
    return twin, entry


def assert_replaced(module: nn.Module, description: str) -> nn.Module:
    """The patched copy, which the report says computes ``description``."""
    twin, entry = patched_twin(module)
    assert (entry.replacement, entry.reason, entry.count) == (description, "", 1)
    assert isinstance(twin, Patched)
    assert isinstance(twin, type(module))
    return twin


def assert_kept(module: nn.Module, reason: str) -> None:
    """Whether the report gives ``reason`` for not replacing ``module``."""
    twin, entry = patched_twin(module)
    assert entry.replacement is None
    assert reason in entry.reason
    assert type(twin) is type(module)


def assert_same(module: nn.Module, twin: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Whether both give equal outputs, and gradients of all floating inputs and parameters, at a random gradient."""
    (want, want_grads), (got, got_grads) = (_outputs_and_gradients(each, *args, **kwargs) for each in (module, twin))
    assert len(want) == len(got)
    assert len(want_grads) == len(got_grads) > 0
    for expected, actual in zip(want + want_grads, got + got_grads, strict=True):
        assert expected.dtype == actual.dtype
        scale = expected.abs().max().item()
        assert scale > 0
        # Both round, in another order: an error relative to the largest value.
        tolerance = TOLERANCE_ULPS * torch.finfo(expected.dtype).eps * scale
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def _outputs_and_gradients(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    def leaf(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().clone().requires_grad_() if is_float else value

    args, kwargs = [leaf(value) for value in args], {name: leaf(value) for name, value in kwargs.items()}
    torch.manual_seed(0)  # for dropouts
    outputs = module(*args, **kwargs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    generator = torch.Generator().manual_seed(1)
    loss = sum((output.double() * torch.randn(output.shape, generator=generator)).sum() for output in outputs)
    inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
    leaves = [*inputs, *module.parameters()]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [output.detach() for output in outputs], [gradient for gradient in gradients if gradient is not None]


def assert_same_gradients(model: nn.Module, patched: nn.Module) -> None:
    """Whether their parameters have equal gradients; those that are nothing but rounding errors are not compared."""
    largest = max(each.grad.abs().max().item() for each in model.parameters() if each.grad is not None)
    for (name, want), got in zip(model.named_parameters(), patched.parameters(), strict=True):
        assert (want.grad is None) == (got.grad is None), name
        if want.grad is not None:
            tolerance = max(1e-5 * want.grad.abs().max().item(), 1e-6 * largest)
            message = partial("{}: {}".format, name)
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=tolerance, msg=message)


def fill(module: nn.Module) -> nn.Module:
    """``module`` with random parameters: zeros and ones, as norms start, would hide mistakes."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module
