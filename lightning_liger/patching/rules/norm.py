"""RMSNorm, with a gate too, and LayerNorm under any name: options are found by comparing outputs and gradients."""

import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_ops import gated_rms_norm, layer_norm, rms_norm
from liger_ops.norm.row_norm import Casting
from liger_ops.norm.sliced_norm import GatedCasting
from lightning_liger.patching.rules.base import (
    Randoms,
    Replacement,
    Rule,
    compare_calls,
    forward_of_tensors,
    own_dtype,
    probe_of,
)
from lightning_liger.patching.verify import Mismatch, Rejected, trial

_LARGEST_EPS = 1e-2
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12)
_WIDTH_OF_WEIGHTLESS = 37  # a prime: a norm of groups rejects it


@dataclass(frozen=True)
class NormReplacement(Replacement):
    """``x / rms(x) * (offset + weight)``, or ``(x - mean(x)) / std(x) * (offset + weight) + bias``."""

    eps: str | float  # the name of the module's attribute, or the value if it has none
    weight: str | None  # the name of the parameter
    bias: str | None
    offset: float
    casting: Casting | None  # of rms_norm, None for layer_norm

    @property
    def kernel(self) -> str:
        return "layer_norm" if self.casting is None else "rms_norm"

    @property
    def description(self) -> str:
        details = [f"{self.casting} casting"] if self.casting is not None else []
        details += [f"offset {self.offset:g}"] if self.offset else []
        return self.kernel + (f" ({', '.join(details)})" if details else "")

    def eps_of(self, module: nn.Module) -> Any:
        return getattr(module, self.eps) if isinstance(self.eps, str) else self.eps

    def normalize(self, module: nn.Module, x: Tensor) -> Tensor:
        weight = None if self.weight is None else getattr(module, self.weight)
        bias = None if self.bias is None else getattr(module, self.bias)
        eps = self.eps_of(module)
        shape = x.shape[-1:] if weight is None else weight.shape
        if self.casting is not None:
            return rms_norm(x, shape, weight, eps, casting=self.casting, offset=self.offset)
        return layer_norm(x, shape, weight if weight is None or not self.offset else weight + self.offset, bias, eps)

    @property
    def reads(self) -> Collection[str | None]:
        return {str(self.eps), self.weight, self.bias}

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        return {"forward": forward_of_tensors(original, self.normalize)}

    def verify(self, module: nn.Module) -> float:
        own = own_dtype(module)
        self._compare(module, torch.float32, torch.float32)
        # The output's dtype tells castings apart. Not every norm takes an input whose dtype is not its weight's.
        self._compare(module, torch.bfloat16, torch.float32)
        return self._compare(module, own, own)

    def _compare(self, module: nn.Module, input_dtype: torch.dtype, dtype: torch.dtype) -> float:
        random = Randoms(module)
        parameters = {
            name: nn.Parameter(random(*parameter.shape, dtype=dtype).detach())
            for name, parameter in module.named_parameters(recurse=False)
        }
        weights = list(parameters.values())
        probe = probe_of(module, **parameters)
        (width,) = weights[0].shape if weights else getattr(module, "normalized_shape", (_WIDTH_OF_WEIGHTLESS,))
        inputs = self._inputs(width, random, input_dtype)
        if input_dtype != dtype and not _runs(probe, *inputs):
            return 0.0
        same = input_dtype == dtype  # which says how far outputs may be rounded
        error = compare_calls(probe, self.normalize, inputs, (*inputs, *weights), evaluate=same)
        if weights and _runs(probe, *self._inputs(2 * width, random, input_dtype)):
            raise Mismatch("it takes rows that are wider than its weights")
        return error

    def _inputs(self, width: int, random: Randoms, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What forward is compared on: rows of different sizes, which show eps, and means, which show centering."""
        scales = torch.tensor([1.0, 1e-3, 30.0, 1.0, 0.1], device=random.device).view(5, 1)
        means = torch.tensor([0.0, 0.0, 0.0, 2.0, -0.1], device=random.device).view(5, 1)
        return ((random(5, width).detach() * scales + means).view(1, 5, width).to(dtype).requires_grad_(),)


def _runs(probe: nn.Module, *inputs: Tensor) -> bool:
    try:
        with trial():
            probe.forward(*inputs)
    except Rejected:
        return False
    return True


@dataclass(frozen=True)
class GatedNormReplacement(NormReplacement):
    """``rms_norm(x) * weight * act(gate)``, or ``rms_norm(x * act(gate)) * weight``; without a gate, the original."""

    casting: GatedCasting
    norm_before_gate: bool
    activation: str
    group_size: int | None

    kernel = "gated_rms_norm"

    @property
    def description(self) -> str:
        details = [f"{self.casting} casting"] + (["norm before gate"] if self.norm_before_gate else [])
        details += [self.activation] if self.activation != "silu" else []
        details += [f"groups of {self.group_size}"] if self.group_size else []
        return f"{self.kernel} ({', '.join(details)})"

    def normalize(self, module: nn.Module, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        weight = None if self.weight is None else getattr(module, self.weight)
        options: Any = {
            "norm_before_gate": self.norm_before_gate,
            "activation": self.activation,
            "casting": self.casting,
        }
        return gated_rms_norm(x, gate, weight, self.eps_of(module), group_size=self.group_size, **options)

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        return {"forward": forward_of_tensors(original, self.normalize, num_tensors=2)}

    def _inputs(self, width: int, random: Randoms, dtype: torch.dtype) -> tuple[Tensor, ...]:
        gate = random(1, 5, width).detach().to(dtype).requires_grad_()
        return *super()._inputs(width, random, dtype), gate


class NormRule(Rule):
    """Modules without children, with an eps and at most two vectors, a weight and a bias; with a gate, at most one."""

    kernels = ("rms_norm", "layer_norm", "gated_rms_norm")

    def candidates(self, module: nn.Module) -> Sequence[Replacement] | str | None:
        looks_like = "norm" in type(module).__name__.lower()
        # PyTorch's eps may be large, or None. p of a dropout may be as small as an eps.
        small = [name for name, value in vars(module).items() if isinstance(value, float) and 0 < value < _LARGEST_EPS]
        names = ["eps"] if isinstance(module, nn.RMSNorm | nn.LayerNorm) else [name for name in small if name != "p"]
        eps = names or (_USUAL_EPS if looks_like else ())
        if not eps or any(module.children()):
            return None
        parameters = dict(module.named_parameters())
        shapes = {tuple(parameter.shape) for parameter in parameters.values()}
        weight, bias, *others = *parameters, None, None
        has_buffers = bool(module.state_dict().keys() - parameters.keys())  # which a checkpoint may change
        if any(others) or has_buffers or len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
            return "its tensors are not one vector of weights and one of biases" if looks_like else None
        num_inputs = len(inspect.signature(module.forward).parameters)
        if num_inputs == 2 and weight is not None and bias is None:
            return list(_gated_norms(module, eps, weight))
        if num_inputs != 1:
            return "its forward takes more than one input" if looks_like else None
        return list(_norms(eps, weight, bias))


_RMS_NORMS: tuple[tuple[float, Casting], ...] = (
    (0.0, "llama"), (1.0, "gemma"), (0.0, "gemma"), (1.0, "llama"), (0.0, "none"),
)  # fmt: skip


def _norms(eps: Sequence[str | float], weight: str | None, bias: str | None) -> Iterator[Replacement]:
    offsets = (0.0,) if weight is None else (0.0, 1.0)
    for each in eps:
        if bias is None:
            forms = (form for form in _RMS_NORMS if form[0] in offsets)
            yield from (NormReplacement(each, weight, None, *form) for form in forms)
        # Either of the two vectors may be the bias.
        for order in [(weight, bias), (bias, weight)][: 1 if bias is None else 2]:
            yield from (NormReplacement(each, *order, offset, None) for offset in offsets)


_GATED_NORMS: tuple[tuple[GatedCasting, bool, str], ...] = (
    ("llama", False, "silu"), ("gemma", True, "silu"), ("gemma", False, "silu"), ("gemma", True, "sigmoid"),
    ("llama", True, "silu"), ("llama", True, "sigmoid"),
)  # fmt: skip


def _gated_norms(module: nn.Module, eps: Sequence[str | float], weight: str) -> Iterator[Replacement]:
    """Those of whole rows first, then of groups of as many columns, or as many groups, as an attribute says."""
    (width,) = getattr(module, weight).shape
    numbers = [value for value in vars(module).values() if type(value) is int and 1 < value < width]
    sizes = dict.fromkeys(size for each in numbers if width % each == 0 for size in (each, width // each))
    for size in (None, *sizes):
        for each in eps:
            yield from (GatedNormReplacement(each, weight, None, 0.0, *form, size) for form in _GATED_NORMS)
