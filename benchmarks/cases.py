"""Descriptions of measurements: an op, its inputs, its contenders, and the least work that each of them must do."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

AGAINST = ("eager", "compile", "torch", "liger")  # contenders that the command line can choose; ours always run
DTYPE = torch.bfloat16

Shape = tuple[int, ...]
Function = Callable[..., Any]


class Unavailable(Exception):
    """Raised for a contender that an op does not have, or that is not installed."""


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call (those that take a gradient require it) and upstream gradients, None for a scalar loss."""

    arguments: tuple[Tensor, ...]
    grad_outputs: tuple[Tensor, ...] | None = None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(argument for argument in self.arguments if argument.requires_grad)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.arguments, *(self.grad_outputs or ())))

    def double(self) -> "Inputs":
        """The same values in float64."""
        arguments = tuple(
            argument.detach().double().requires_grad_(argument.requires_grad)
            if argument.is_floating_point()
            else argument
            for argument in self.arguments
        )
        return Inputs(arguments, self.grad_outputs and tuple(tensor.double() for tensor in self.grad_outputs))


class Maker:
    """Makes random tensors on a device, the same ones from the same seed."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=DTYPE, generator=self._generator)

    def leaf(self, *shape: int) -> Tensor:
        """Activations that take a gradient."""
        return self.normal(*shape).requires_grad_()

    def weight(self, size: int) -> Tensor:
        """A norm's weight."""
        return self.normal(size).mul_(0.1).add_(1.0).requires_grad_()

    def labels(self, num_tokens: int, num_classes: int, percent_ignored: int = 0) -> Tensor:
        labels = torch.randint(num_classes, (num_tokens,), device=self.device, generator=self._generator)
        order = torch.randperm(num_tokens, device=self.device, generator=self._generator)
        labels[order[: num_tokens * percent_ignored // 100]] = -100
        return labels


@dataclass(frozen=True)
class Contender:
    """An implementation of an op.

    Attributes:
        call: Takes the op's arguments, after the function that ``target`` names if there is one.
        target: ``"module:attribute"``, imported only when the contender is about to run.
        has_gradient: False for work that is timed for comparison and gives no gradient.
    """

    call: Function | None = None
    target: str | None = None
    has_gradient: bool = True

    def load(self) -> Function:
        if self.target is None:
            return self.call
        try:
            function = pkgutil.resolve_name(self.target)
        except (ImportError, AttributeError) as error:
            raise Unavailable(str(error)) from error
        call = self.call
        return function if call is None else lambda *arguments: call(function, *arguments)


def ours(name: str, call: Function | None = None) -> Contender:
    return Contender(call, f"liger_ops:{name}")


def pytorch(name: str, call: Function | None = None) -> Contender:
    return Contender(call, f"torch.nn.functional:{name}")


def liger_kernel(name: str, call: Function | None = None) -> Contender:
    return Contender(call, f"liger_kernel.transformers.functional:{name}")


@dataclass(frozen=True)
class Sweep:
    """One size varied, the others fixed: a figure's horizontal axis."""

    axis: str
    sizes: tuple[int, ...]
    shape: Callable[[int], Shape]
    fixed: str

    def shapes(self, tiny: bool) -> list[tuple[int, Shape]]:
        """Each size with its shape; all numbers at most a 32nd with ``tiny``."""
        if not tiny:
            return [(size, self.shape(size)) for size in self.sizes]
        return [(size // 32, tuple(max(1, number // 32) for number in self.shape(size))) for size in self.sizes[:2]]


def _join(*shape: int) -> str:
    return "x".join(map(str, shape))


@dataclass(frozen=True)
class Op:
    """An operation and all of its measurements.

    Attributes:
        name: As on the command line and in the records.
        title: As in figures.
        inputs: Makes inputs from a :class:`Maker` and a shape.
        exact: The op in plain PyTorch without casts, called with float64 inputs as the reference.
        contenders: By name. ``compile`` is made from ``eager``.
        shapes: The shapes that are measured and compared with the floor.
        small: The shape for the host's time, and for the gradients' error if ``error_shape`` is None.
        tiny: The shape that replaces all of these with ``--quick``.
        rate: The rate that bounds the op: ``"copy"`` (bytes per second) or ``"matrix"`` (FLOPs per second).
        amount: Bytes of one pass over the op's large tensors, or FLOPs of one matrix product, from its arguments.
        passes: Number of such passes that each direction needs at least.
        label: Formats a shape.
        split: Whether forward is also measured alone.
    """

    name: str
    title: str
    inputs: Callable[..., Inputs]
    exact: Function
    contenders: Mapping[str, Contender]
    shapes: tuple[Shape, ...]
    small: Shape
    tiny: Shape
    amount: Callable[..., int]
    passes: Mapping[str, int]
    rate: str = "copy"
    label: Callable[..., str] = _join
    error_shape: Shape | None = None
    split: bool = True
    sweep: Sweep | None = field(default=None, repr=False)

    def chosen(self, against: tuple[str, ...]) -> tuple[str, ...]:
        """Names of the contenders to run: ours, those that always run, and ``against``."""
        return (*(name for name in self.contenders if name not in AGAINST), *against)

    def load(self, name: str, device: torch.device) -> Function:
        """The contender of that name as a function of the op's arguments.

        Raises:
            Unavailable: If there is none, with the reason.
        """
        if name == "compile":
            torch._dynamo.reset()  # otherwise it stops compiling after a few shapes
            return torch.compile(self.contenders["eager"].load(), dynamic=False)
        if name not in self.contenders:
            raise Unavailable("there is no function for this op other than eager's")
        if name == "liger" and device.type != "cuda":
            raise Unavailable("it needs a GPU")
        return self.contenders[name].load()
