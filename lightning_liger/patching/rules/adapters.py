"""Adapters of peft on the weights of experts: in low-rank products, where peft adds them to the weights.

Only what peft does around the experts' forward is replaced; which adapters are active, merged or disabled stays peft's.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_liger.patching.report import PatchEntry
from lightning_liger.patching.rules.base import Patched, Randoms, Replacement, Rule, own_dtype
from lightning_liger.patching.rules.experts import ExpertsReplacement, adapted
from lightning_liger.patching.verify import compare


@dataclass(frozen=True)
class AdapterReplacement(Replacement):
    """Adapters of one weight of experts, and what replaces these."""

    experts: ExpertsReplacement

    @property
    def kernel(self) -> str:
        return self.experts.kernel

    @property
    def description(self) -> str:
        return f"{self.experts.description}, low-rank update"

    def namespace(self, original: Any) -> dict[str, Any]:
        @contextmanager
        def _activate_lora(module: Any, active_adapters: list[str]) -> Iterator[None]:
            experts = module.get_base_layer()
            is_replaced = isinstance(getattr(experts, "liger_replacement", None), ExpertsReplacement)
            with adapted(experts, module) if is_replaced else original._activate_lora(module, active_adapters):
                yield

        return {"_activate_lora": _activate_lora}

    def verify(self, module: nn.Module) -> float:
        self._compare(module, Randoms(), torch.float32)
        return self._compare(module, Randoms(module), own_dtype(module))

    def _compare(self, module: Any, random: Randoms, dtype: torch.dtype) -> float:
        from peft import LoraConfig, inject_adapter_in_model

        experts, tensors = self.experts.small_call(module.get_base_layer(), random, dtype, 1.0)
        name = module.parameter_name
        config = LoraConfig(r=2, lora_alpha=3, init_lora_weights=False, target_parameters=[f"experts.{name}"])
        modules = nn.ModuleDict({"experts": experts})
        with torch.random.fork_rng(devices=[]):
            inject_adapter_in_model(config, modules)
        wrapped: Any = modules["experts"]

        def run() -> Tensor:
            with adapted(experts, wrapped):
                return self.experts.run(experts, *tensors)

        return compare(
            partial(wrapped, *tensors), run, [each for each in (*tensors, *wrapped.parameters()) if each.requires_grad]
        )


class AdapterRule(Rule):
    """Modules of peft that adapt one weight of experts, which ``decide`` says the replacement of."""

    kernels = ("moe_experts",)

    def __init__(self, decide: Callable[[nn.Module], Iterator[tuple[PatchEntry, Replacement | None]]]) -> None:
        self._decide = decide

    def candidates(self, module: nn.Module) -> Sequence[Replacement] | str | None:
        wrapper_class = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
        if wrapper_class is None or not isinstance(module, wrapper_class):
            return None
        inner: Any = module.get_base_layer()
        for entry, found in self._decide(inner):
            if entry.kernel not in self.kernels:
                continue
            experts = inner.liger_replacement if isinstance(inner, Patched) else found
            if not isinstance(experts, ExpertsReplacement):
                return f"what it adapts is not replaced: {entry.reason}"
            if module.parameter_name not in (experts.gate_up, experts.down):
                return "it adapts no weight of experts"
            if not hasattr(module, "get_delta_factors"):
                return "this version of peft does not give the factors of an update, which 0.21 does"
            return [AdapterReplacement(experts)]
        return None
