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
from lightning_liger.lazy.logits import LazyLogits, loss_wanted
from lightning_liger.lazy.steps import living
from lightning_liger.patching.rules.base import Replacement, Rule


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
            wanted = differentiable or loss_wanted.get()
            # Transforms of torch.func differentiate what the head computes.
            if not wanted or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
                return original.forward(self, input)
            dtype = autocast_dtype(input.device.type) or self.weight.dtype
            counters = self.__dict__.setdefault("fusion_counters", FusionCounters())
            if isinstance(self.weight, DTensor):
                # A forward set on the instance, as by transformers' tensor parallelism, takes tensors only.
                logits = None if "forward" in vars(self) else distributed_logits(self, input, dtype, counters, options)
                return original.forward(self, input) if logits is None else logits
            head = HeadParameters(
                weight=self.weight, bias=self.bias, compute_dtype=dtype, counters=counters, options=options
            )
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
