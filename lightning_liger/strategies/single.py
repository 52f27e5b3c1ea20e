"""``liger``: one GPU or CPU with fused kernels, for Trainer and Fabric."""

from typing import Any

import lightning.fabric.strategies.single_device as fabric_single
import lightning.pytorch.strategies.single_device as pytorch_single
import torch
from lightning.fabric.strategies import _StrategyRegistry

from lightning_liger.patching.apply import KernelChoice
from lightning_liger.strategies.parts.clipping import TrainerClipping
from lightning_liger.strategies.parts.kernels import FabricKernels, TrainerKernels

_NAME = "liger"
_DESCRIPTION = "One device with fused kernels and a loss without logits"


class _OneDevice:
    """What the Trainer's and Fabric's strategies share; placed before Lightning's class.

    Trainer and Fabric give their devices to strategies with ``parallel_devices``, Lightning's own has none: it gets its
    device from whoever makes it, which a strategy that is chosen by its name cannot.
    """

    def __init__(
        self, kernels: KernelChoice = "auto", device: torch.device | str | int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(kernels=kernels, device="cpu" if device is None else device, **kwargs)  # type: ignore[call-arg]
        self._parallel_devices = None if device is None else [self._root_device]

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The one device, None before it is known."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(
                f"strategy={_NAME!r} trains on one device, got {len(devices)}: set devices=1, or"
                " strategy='liger_fsdp' (parameters sharded) or 'liger_ddp' (parameters on every device)"
            )
        self._parallel_devices = devices
        self._root_device = devices[0]

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        if _NAME not in strategy_registry:
            strategy_registry.register(_NAME, cls, description=_DESCRIPTION)


class LigerSingleDeviceStrategy(_OneDevice, TrainerKernels, TrainerClipping, pytorch_single.SingleDeviceStrategy):
    """Lightning's :class:`~lightning.pytorch.strategies.SingleDeviceStrategy` with fused kernels and a fused loss.

    Args:
        kernels: ``"auto"``, ``"none"``, a list of names or a dict with options; see
            :func:`~lightning_liger.apply_liger_kernels`.
        device: By default the one that ``accelerator`` and ``devices`` choose.
        on_nonfinite_grad: What to do in a step whose gradients' norm is infinite or NaN, as in
            :class:`~lightning_liger.LigerStrategy`. The norm before clipping is logged as ``grad_norm``.
        **kwargs: As in Lightning's strategy.

    Raises:
        ValueError: For an unknown kernel or ``on_nonfinite_grad``, and when the Trainer has several devices.
    """

    strategy_name = _NAME


class FabricLigerSingleDeviceStrategy(_OneDevice, FabricKernels, fabric_single.SingleDeviceStrategy):
    """:class:`LigerSingleDeviceStrategy` for Fabric; takes the same arguments."""
