"""Fused kernels under any strategy of Lightning."""

import functools
from typing import Any

import lightning as L
from typing_extensions import override

from lightning_liger.lazy.logits import lazy_logits
from lightning_liger.patching import PatchReport, check_kernels
from lightning_liger.patching.apply import KernelChoice, apply_and_announce


class LigerCallback(L.Callback):
    """Applies fused kernels to the module of a Trainer with any strategy.

    The kernels are applied after the module's ``configure_model``, before the strategy wraps the module.

    Args:
        kernels: As in :func:`~lightning_liger.apply_liger_kernels`.

    Raises:
        ValueError: For an unknown kernel.
    """

    def __init__(self, kernels: KernelChoice = "auto") -> None:
        check_kernels(kernels)
        self.kernels = kernels
        self.patch_report: PatchReport | None = None
        self._lazy: Any = None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # There is no hook between configure_model and the strategy's wrapping, so configure_model is extended.
        configure_model = pl_module.configure_model

        @functools.wraps(configure_model)
        def configure_and_patch() -> None:
            configure_model()
            self._apply(pl_module)

        if type(pl_module).configure_model is L.LightningModule.configure_model:
            self._apply(pl_module)
        else:
            pl_module.configure_model = configure_and_patch  # type: ignore[method-assign]  # of this instance only

    def _apply(self, pl_module: L.LightningModule) -> None:
        self.patch_report = apply_and_announce(pl_module, self.kernels, self.patch_report)

    @override
    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        self._lazy = lazy_logits()
        self._lazy.__enter__()

    @override
    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self._leave_lazy()

    def _leave_lazy(self) -> None:
        if self._lazy is not None:
            self._lazy.__exit__(None, None, None)
            self._lazy = None

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._leave_lazy()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        pl_module.__dict__.pop("configure_model", None)
