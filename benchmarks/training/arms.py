"""What is compared: an implementation of the model, and how its activations are kept."""

import re
from argparse import ArgumentTypeError
from dataclasses import dataclass
from typing import Any

IMPLEMENTATIONS = {
    "hf": "Hugging Face",
    "liger_kernel": "liger-kernel",
    "ours": "lightning-liger",
    "hf_compiled": "Hugging Face, layers compiled",
    "ours_compiled": "lightning-liger, layers compiled",
    "ours_captured": "lightning-liger, layers in CUDA graphs",
    "hf_fsdp2": "Hugging Face, FSDP2",
    "ours_fsdp2": "lightning-liger, FSDP2",
    "ours_fsdp2_ep": "lightning-liger, FSDP2, experts split over all GPUs",
    "ours_fp8": "lightning-liger, float8",
    "ours_fsdp2_fp8": "lightning-liger, FSDP2, float8",
    "ours_fp8_gw_hp": "lightning-liger, float8, weight gradients in bfloat16",
    "ours_fp8_save": "lightning-liger, float8, saved in float8",
}
"""Names on the command line and in results, with the names in tables and figures."""

FLOAT8: dict[str, dict[str, Any]] = {
    "ours_fp8": {},
    "ours_fsdp2_fp8": {"all_gather": True},
    "ours_fp8_gw_hp": {"high_precision_wgrad": True},
    "ours_fp8_save": {"save": "fp8"},
}
"""Arguments of ``Float8Recipe`` for implementations whose linear layers run in float8."""

SYNTAX = (
    "IMPLEMENTATION or IMPLEMENTATION:PLAN. Implementations: " + ", ".join(IMPLEMENTATIONS) + ". Plans: none or full"
    " (layers that are recomputed); for ours also a number of layers (8), a memory budget in GiB (61.3GiB), as a share"
    " of the GPU (0.8), or auto"
)


@dataclass(frozen=True)
class Arm:
    """An implementation with a plan for its activations, ``"hf:full"`` as text."""

    implementation: str
    plan: str = ""

    def __post_init__(self) -> None:
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(f"no implementation {self.implementation!r}; known: {', '.join(IMPLEMENTATIONS)}")
        known = r"none|full|auto|\d+|\d+(\.\d+)?GiB|0\.\d+|1\.0" if self.is_ours else r"none|full"
        if self.implementation == "ours_captured":  # which takes no plan
            known = ""
        if self.plan and not re.fullmatch(known, self.plan):
            raise ValueError(f"{self.implementation} has no plan {self.plan!r}; an arm is {SYNTAX}")

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """The ``type`` of an argument of the command line."""
        implementation, _, plan = text.strip().partition(":")
        try:
            return cls(implementation, plan)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error

    @property
    def is_ours(self) -> bool:
        return self.implementation.startswith("ours")

    @property
    def recomputes_all(self) -> bool:
        """Whether Hugging Face's own gradient checkpointing recomputes every layer."""
        return self.plan == "full" and not self.is_ours

    @property
    def strategy_arguments(self) -> dict[str, Any]:
        """The arguments of our strategies that ask for the plan, CUDA graphs or compilation."""
        if self.implementation == "ours_captured":
            return {"cuda_graphs": True}
        compiled = {"compile": "layers"} if self.implementation == "ours_compiled" else {}
        return compiled | self._plan_arguments

    @property
    def _plan_arguments(self) -> dict[str, Any]:
        if self.plan in ("none", "full"):
            return {"activation_checkpointing": self.plan}
        if self.plan.isdecimal():
            return {"activation_checkpointing": int(self.plan)}
        if self.plan == "auto":
            return {"memory_budget": "auto"}
        return {"memory_budget": float(self.plan.removesuffix("GiB"))} if self.plan else {}

    def __str__(self) -> str:
        return f"{self.implementation}:{self.plan}" if self.plan else self.implementation


def parse_arms(text: str) -> tuple[Arm, ...]:
    """The ``type`` of an argument that is a comma-separated list of arms."""
    return tuple(Arm.parse(one) for one in text.split(",") if one.strip())


def parse_numbers(text: str) -> tuple[int, ...]:
    """The ``type`` of an argument that is a comma-separated list of positive integers; 4k is 4096."""
    numbers = []
    for one in text.split(","):
        found = re.fullmatch(r"([1-9]\d*)(k?)", one.strip())
        if not found:
            raise ArgumentTypeError(f"expected positive integers such as 4,8 or 4k,16k, got {text!r}")
        numbers.append(int(found[1]) * (1024 if found[2] else 1))
    return tuple(numbers)
