"""RMSNorm and LayerNorm under any name: rounding, offset and eps are found by comparing outputs and gradients."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_ops import layer_norm, rms_norm
from liger_ops.norm.rms_norm import Casting
from lightning_liger.patching.rules.base import Randoms, Replacement, Rule, forward_of_one_tensor, own_dtype, probe_of
from lightning_liger.patching.verify import Mismatch, Rejected, compare, trial

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

    def normalize(self, module: nn.Module, x: Tensor) -> Tensor:
        weight, bias = (None if name is None else getattr(module, name) for name in (self.weight, self.bias))
        eps: Any = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        shape = x.shape[-1:] if weight is None else weight.shape
        if self.casting is not None:
            return rms_norm(x, shape, weight, eps, casting=self.casting, offset=self.offset)
        return layer_norm(x, shape, weight if weight is None or not self.offset else weight + self.offset, bias, eps)

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        return {"forward": forward_of_one_tensor(original, self.normalize)}

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
        x = _rows(width, random).to(input_dtype).requires_grad_()
        if input_dtype != dtype and not _runs(probe, x):
            return 0.0
        error = compare(lambda: probe.forward(x), lambda: self.normalize(probe, x), (x, *weights))
        if weights and _runs(probe, _rows(2 * width, random).to(input_dtype)):
            raise Mismatch("it takes rows that are wider than its weights")
        return error


def _runs(probe: nn.Module, x: Tensor) -> bool:
    try:
        with trial():
            probe.forward(x)
    except Rejected:
        return False
    return True


def _rows(width: int, random: Randoms) -> Tensor:
    """Rows of different sizes, which show eps, and different means, which show centering."""
    scales = torch.tensor([1.0, 1e-3, 30.0, 1.0, 0.1], device=random.device).view(5, 1)
    means = torch.tensor([0.0, 0.0, 0.0, 2.0, -0.1], device=random.device).view(5, 1)
    return (random(5, width).detach() * scales + means).view(1, 5, width)


class NormRule(Rule):
    """Modules without children, with an eps and at most two vectors, a weight and a bias."""

    kernels = ("rms_norm", "layer_norm")

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
        if len(inspect.signature(module.forward).parameters) != 1:
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
