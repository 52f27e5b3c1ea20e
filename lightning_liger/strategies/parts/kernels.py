"""Strategies, precision plugins and the callback apply kernels to a model before an engine wraps it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn import Module

from lightning_liger.patching import PatchReport, apply_liger_kernels, check_kernels
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.patching.float8 import Float8Choice, check_device, check_float8

_WITHOUT_FLOAT8 = ("16-true", "16-mixed", "64-true")


class Kernels:
    """Applies the chosen kernels to models; raises for a wrong choice."""

    def __init__(self, choice: KernelChoice, fp8: Float8Choice = None, *, gathers_float8: bool = False) -> None:
        check_kernels(choice)
        self.choice = choice
        self.recipe = check_float8(fp8)
        if self.recipe is not None and self.recipe.all_gather and not gathers_float8:
            raise ValueError(f"{fp8!r}: all_gather=True is for 'liger_model_parallel', only FSDP2 gathers in float8")
        self.report: PatchReport | None = None
        """Of the last model in which modules were replaced, None before the first model."""
        self._is_left = False

    @contextmanager
    def left_to_the_strategy(self) -> Iterator[None]:
        """A context in which a precision plugin applies none: a strategy of ours does, which knows its engine."""
        self._is_left = True
        try:
            yield
        finally:
            self._is_left = False

    def apply(
        self,
        model: Module,
        precision: str = "",
        *,
        holds_frozen: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Applies the kernels to a model whose parameters have their final dtypes; again, changes nothing.

        ``precision`` is Lightning's, ``holds_frozen`` whether frozen weights may be held in float8 by default,
        ``device`` where the model will be.
        """
        if self._is_left:
            return
        recipe = self.recipe
        if recipe is not None:
            if precision in _WITHOUT_FLOAT8:
                raise ValueError(f"fp8 needs precision 'bf16-true', 'bf16-mixed' or '32-true', got {precision!r}")
            if device is not None:
                check_device(recipe, device)
            if recipe.hold_frozen == "auto":
                recipe = replace(recipe, hold_frozen=holds_frozen)
        report = apply_liger_kernels(model, self.choice, recipe)
        if self.report is None or report.num_replaced:
            self.report = report
            numbers = "" if recipe is None else f", fp8={recipe}"
            rank_zero_info(
                f"lightning-liger: fused kernels in {report.num_replaced} modules (kernels={self.choice}{numbers})"
            )
