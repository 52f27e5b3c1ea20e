"""The LM head: a linear layer that returns lazy logits."""

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
from lightning_liger.lazy.logits import LazyLogits, loss_wanted, traced
from lightning_liger.lazy.steps import living
from lightning_liger.lazy.traced import TracedLogits
from lightning_liger.lazy.warning import warn_criterion
from lightning_liger.patching.rules.base import Replacement, Rule


@torch.compiler.assume_constant_result  # torch 2.11 says True to code that it traces
def _is_exporting() -> bool:
    return torch.compiler.is_exporting()


@torch.compiler.assume_constant_result
def _warn_whole() -> None:
    warn_criterion()


def _is_exported() -> bool:
    """Whether the code that is traced is not torch.compile's, which can return logits that are computed later."""
    return not torch.compiler.is_dynamo_compiling() or _is_exporting()


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
            wanted = differentiable or (traced.is_wanted if is_traced else loss_wanted.get())
            # Transforms of torch.func differentiate what the head computes.
            is_whole = is_traced and (traced.is_whole or _is_exported())
            if is_whole and wanted and traced.is_whole:
                _warn_whole()
            if not wanted or is_whole or torch._C._are_functorch_transforms_active():
                return original.forward(self, input)
            dtype = autocast_dtype(input.device.type) or self.weight.dtype
            counters = getattr(self, "fusion_counters", None) or FusionCounters()
            if not is_traced:
                self.fusion_counters = counters
            if isinstance(self.weight, DTensor):
                # A forward set on the instance, as by transformers' tensor parallelism, takes tensors only.
                logits = None if "forward" in vars(self) else distributed_logits(self, input, dtype, counters, options)
                return original.forward(self, input) if logits is None else logits
            head = HeadParameters(
                weight=self.weight, bias=self.bias, compute_dtype=dtype, counters=counters, options=options
            )
            if is_traced:
                logits = TracedLogits.of(input, head, LogitTransform(dtype))
                return logits if traced.is_returned else logits.valued(original.forward(self, input))
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
