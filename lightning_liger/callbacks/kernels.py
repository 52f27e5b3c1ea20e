"""Fused kernels under any strategy of Lightning."""

import contextlib
import functools
from typing import Any

import lightning as L
from typing_extensions import override

from lightning_liger.lazy.logits import lazy_logits
from lightning_liger.lazy.steps import settle
from lightning_liger.monitor.callback import after_configure_model
from lightning_liger.patching import PatchReport
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.patching.float8 import Float8Choice
from lightning_liger.strategies.parts.activations import ActivationCheckpointing, ActivationControl, MemoryBudget
from lightning_liger.strategies.parts.kernels import Kernels


class LigerCallback(L.Callback):
    """Applies fused kernels to the module of a Trainer with any strategy, and controls how its layers run.

    Both are done after the module's ``configure_model``, before the strategy wraps the module.

    Args:
        kernels: As in :func:`~lightning_liger.apply_liger_kernels`.
        activation_checkpointing: The layers that are recomputed in backward: ``"none"``, ``"full"``, the number of the
            first ones, or classes of layers or their names; see docs/training.md.
        memory_budget: A share of the GPU's memory up to 1, GiB above 1, or ``"auto"``.
        fp8: As in :func:`~lightning_liger.apply_liger_kernels`.

    Raises:
        TypeError: For an argument of a wrong type.
        ValueError: For an unknown kernel, or both ``activation_checkpointing`` and ``memory_budget``.
    """

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        activation_checkpointing: ActivationCheckpointing | None = None,
        memory_budget: MemoryBudget | None = None,
        fp8: Float8Choice = None,
    ) -> None:
        self.kernels, self.fp8 = kernels, fp8
        self._kernels = Kernels(kernels, fp8)
        self._activations = ActivationControl(activation_checkpointing, memory_budget)
        self._activations.layers_communicate = True  # the strategy may; ranks follow one plan then
        self._num_steps = 0
        self._lazy = contextlib.ExitStack()

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        after_configure_model(pl_module, functools.partial(self._apply, trainer, pl_module))

    def _apply(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._kernels.apply(pl_module, trainer.precision or "", device=trainer.strategy.root_device)
        if self.kernels != "none" or self._activations.is_asked_for:
            self._activations.control(pl_module, trainer.strategy.root_device)

    @property
    def patch_report(self) -> PatchReport | None:
        """The report of replaced modules, None before the module was set up."""
        return self._kernels.report

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step != self._num_steps:
            self._num_steps = trainer.global_step
            self._activations.step_ends()

    @override
    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        self._lazy.callback(settle, "the end of a step")
        self._lazy.enter_context(lazy_logits())

    @override
    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self._lazy.close()

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if pl_module.automatic_optimization:  # or else the variables of the training step exist
            settle("optimizer.step()")

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_exception = on_validation_batch_end

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        pl_module.__dict__.pop("configure_model", None)
