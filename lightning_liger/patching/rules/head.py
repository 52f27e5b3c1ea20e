"""The LM head: a linear layer that returns lazy logits."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_ops.backend import autocast_dtype
from lightning_liger.lazy.distributed import distributed_logits
from lightning_liger.lazy.expression import Expression
from lightning_liger.lazy.head import FusionCounters, HeadParameters, LogitTransform
from lightning_liger.lazy.logits import LazyLogits, loss_wanted
from lightning_liger.lazy.steps import clock, living
from lightning_liger.lazy.traced import TracedLogits
from lightning_liger.lazy.warning import warn_criterion
from lightning_liger.patching.rules.base import Replacement, Rule

LOSS_WANTED = "liger_loss_wanted"
"""The attribute of models whose calls say whether a loss is wanted."""


@torch.compiler.assume_constant_result  # so that it runs while the code is traced
def _place_in_graph() -> str:
    """Whether logits that are traced now "leave" the graph, "stay" in it, or have to be "whole"."""
    if torch.compiler.is_exporting():  # which torch 2.11 says in all code that it traces
        return "whole"
    clock.is_read = True
    frame = inspect.currentframe()
    while (frame := frame and frame.f_back) is not None:
        # Only calls of modules that are not traced are here: of a model that is compiled itself.
        if frame.f_code.co_filename == nn.modules.module.__file__:
            model = frame.f_locals.get("self")
            if isinstance(model, nn.Module) and LOSS_WANTED in vars(model):
                model_class: Any = type(model)
                return "whole" if _makes_criterion(model_class) else "leaves"
    return "stays"


@functools.cache
def _makes_criterion(model_class: Any) -> bool:
    """Whether forward makes a ``CrossEntropyLoss()``, which the compiler calls without asking its arguments."""
    code = getattr(inspect.unwrap(model_class.forward), "__code__", None)
    found = code is not None and nn.CrossEntropyLoss.__name__ in code.co_names
    if found:
        warn_criterion(model_class.__name__)
    return found


@dataclass(frozen=True)
class HeadReplacement(Replacement):
    """A linear layer that returns :class:`LazyLogits` with gradients enabled or inside ``lazy_logits()``."""

    options: tuple[tuple[str, Any], ...] = ()  # names and values of the fused loss's
    kernel = "linear_cross_entropy"
    description = "LazyLogits, linear_cross_entropy"

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        options = dict(self.options)
        living()  # a step whose closure makes the first lazy logits is one already

        def forward(self: nn.Linear, input: Tensor) -> Tensor | LazyLogits:
            differentiable = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
            is_traced = torch.compiler.is_compiling()
            wanted = differentiable or loss_wanted.value
            # Transforms of torch.func differentiate what the head computes.
            if not wanted or torch._C._are_functorch_transforms_active():
                return original.forward(self, input)
            counters: Any = getattr(self, "fusion_counters", None)
            if counters is None:
                counters = FusionCounters()
                if not is_traced:
                    self.fusion_counters = counters
            is_sharded = isinstance(self.weight, DTensor)
            place = "eager"
            if is_traced:
                place = _place_in_graph() if torch.compiler.is_dynamo_compiling() else "whole"
                if place == "whole" or is_sharded or counters.is_gathered:
                    return original.forward(self, input)
            dtype = autocast_dtype(input.device.type) or self.weight.dtype
            if is_sharded:
                # A forward set on the instance, as by transformers' tensor parallelism, takes tensors only.
                logits = None if "forward" in vars(self) else distributed_logits(self, input, dtype, counters, options)
                return original.forward(self, input) if logits is None else logits
            head = HeadParameters(
                weight=self.weight, bias=self.bias, compute_dtype=dtype, counters=counters, options=options
            )
            if is_traced:
                traced_logits = TracedLogits.of(input, head, LogitTransform(dtype))
                return traced_logits if place == "leaves" else traced_logits.valued(original.forward(self, input))
            return LazyLogits.of(Expression(input, head, LogitTransform(dtype)))

        return {"forward": forward}

    def verify(self, module: nn.Module) -> float:
        return 0.0  # the postponed projection is that of nn.Linear


class HeadRule(Rule):
    """A model's output embeddings, if they are a linear layer."""

    kernels = ("linear_cross_entropy",)

    def __init__(self, options: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.options = tuple(sorted(options.items()))

    def candidates(self, module: nn.Module) -> Sequence[Replacement] | str | None:
        if type(module).forward is not nn.Linear.forward:
            return f"the head is {type(module).__name__}, not torch.nn.Linear"
        return [HeadReplacement(self.options)]
