"""``liger``: one GPU or CPU with fused kernels, for Trainer and Fabric."""

from typing import TYPE_CHECKING, Any

import lightning.fabric.strategies.single_device as fabric_single
import lightning.pytorch.strategies.single_device as pytorch_single
import torch

from lightning_liger.patching.apply import KernelChoice
from lightning_liger.strategies.parts.activations import FabricActivations, TrainerActivations
from lightning_liger.strategies.parts.adoption import FabricKernels, TrainerKernels
from lightning_liger.strategies.parts.early_release import EarlyRelease
from lightning_liger.strategies.parts.fault_tolerance import FabricFaultTolerance, TrainerFaultTolerance
from lightning_liger.strategies.parts.materialization import FabricMaterialization, TrainerMaterialization

if TYPE_CHECKING:
    _Strategy = Any  # Lightning's for the Trainer or for Fabric, which have no common base
else:
    _Strategy = object


class _OneDevice(_Strategy):
    """Takes its one device from Trainer or Fabric. A mixin for strategies of both.

    They give their devices to strategies with ``parallel_devices``. Lightning's strategy has none: its device is an
    argument, which a strategy that is chosen by name does not get.
    """

    _root_device: torch.device

    def __init__(
        self, kernels: KernelChoice = "auto", device: torch.device | str | int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(kernels=kernels, device="cpu" if device is None else device, **kwargs)
        self._parallel_devices = None if device is None else [self._root_device]

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """A list of the device, None before it is known."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(
                f"strategy='liger' trains on one device, got {len(devices)}: set devices=1, or"
                " strategy='liger_fsdp' (parameters sharded) or 'liger_ddp' (parameters on every device)"
            )
        self._parallel_devices = devices
        self._root_device = devices[0]


class LigerSingleDeviceStrategy(
    _OneDevice,
    TrainerFaultTolerance,
    TrainerActivations,
    EarlyRelease,
    TrainerKernels,
    TrainerMaterialization,
    pytorch_single.SingleDeviceStrategy,
):
    """Lightning's :class:`~lightning.pytorch.strategies.SingleDeviceStrategy` with fused kernels and a fused loss.

    Args:
        kernels: ``"auto"``, ``"none"``, a name, a list of names or a dict of changes to ``"auto"``; see
            :func:`~lightning_liger.apply_liger_kernels`.
        device: By default the one that ``accelerator`` and ``devices`` choose.
        on_nonfinite_grad: What to do in a step whose gradients' norm is infinite or NaN, as in
            :class:`~lightning_liger.LigerFSDPStrategy`. The norm before clipping is logged as ``grad_norm``.
        activation_checkpointing: As in :class:`~lightning_liger.LigerFSDPStrategy`.
        memory_budget: As in :class:`~lightning_liger.LigerFSDPStrategy`.
        fault_tolerance: As in :class:`~lightning_liger.LigerFSDPStrategy`.
        **kwargs: As in Lightning's strategy.

    Raises:
        ValueError: For an unknown kernel or ``on_nonfinite_grad``, and when the Trainer has several devices.
    """

    strategy_name = "liger"


class FabricLigerSingleDeviceStrategy(
    _OneDevice,
    FabricFaultTolerance,
    FabricActivations,
    FabricKernels,
    FabricMaterialization,
    fabric_single.SingleDeviceStrategy,
):
    """:class:`LigerSingleDeviceStrategy` for Fabric; takes the same arguments, except for ``on_nonfinite_grad``."""
