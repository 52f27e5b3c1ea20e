"""``liger``: one GPU or CPU with fused kernels, for Trainer and Fabric."""

from typing import Any

import lightning.fabric.strategies.single_device as fabric_single
import lightning.pytorch.strategies.single_device as pytorch_single
import torch

from lightning_liger.patching.apply import KernelChoice
from lightning_liger.strategies.fabric import FabricStrategy
from lightning_liger.strategies.trainer import TrainerStrategy


class _OneDevice:
    """Takes its one device from Trainer or Fabric. A mixin for strategies of both.

    They give their devices to strategies with ``parallel_devices``. Lightning's strategy has none: its device is an
    argument, which a strategy that is chosen by name does not get.
    """

    _holds_frozen = True
    _keeps_parameters = True

    def __init__(
        self, kernels: KernelChoice = "auto", device: torch.device | str | int | None = None, **kwargs: Any
    ) -> None:
        self._devices = None if device is None else [torch.device(device)]
        super().__init__(kernels, **kwargs)  # type: ignore[call-arg]  # of the next class

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """A list of the device, None before it is known."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(
                f"strategy='liger' trains on one device, got {len(devices)}: set devices=1, or"
                " strategy='liger_fsdp' (parameters sharded) or 'liger_ddp' (parameters on every device)"
            )
        self._devices = devices

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu") if self._devices is None else self._devices[0]


class LigerSingleDeviceStrategy(_OneDevice, TrainerStrategy, pytorch_single.SingleDeviceStrategy):
    """Lightning's :class:`~lightning.pytorch.strategies.SingleDeviceStrategy` with fused kernels and a fused loss.

    Args:
        device: By default the one that ``accelerator`` and ``devices`` choose.
        context_parallel_size: Only 1.
        **kwargs: ``kernels``, ``on_nonfinite_grad``, ``activation_checkpointing``, ``memory_budget``,
            ``fault_tolerance`` and ``compile`` as in :class:`~lightning_liger.LigerFSDPStrategy`; ``cuda_graphs=True``
            replays layers from CUDA graphs; others as in Lightning's strategy.

    Raises:
        ValueError: For an unknown kernel or ``on_nonfinite_grad``, and when the Trainer has several devices.
    """

    strategy_name = "liger"


class FabricLigerSingleDeviceStrategy(_OneDevice, FabricStrategy, fabric_single.SingleDeviceStrategy):
    """:class:`LigerSingleDeviceStrategy` for Fabric, without ``on_nonfinite_grad`` and ``context_parallel_size``."""
