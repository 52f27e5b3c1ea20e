"""``liger_ddp``: Distributed Data Parallel with fused kernels, for Trainer and Fabric."""

from typing import Any

import lightning.fabric.strategies.ddp as fabric_ddp
import lightning.pytorch.strategies.ddp as pytorch_ddp
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_liger.strategies.fabric import FabricStrategy
from lightning_liger.strategies.parts.visible_logits import HIDDEN_STATES
from lightning_liger.strategies.trainer import TrainerStrategy


class LigerDDPStrategy(TrainerStrategy, pytorch_ddp.DDPStrategy):
    """Lightning's :class:`~lightning.pytorch.strategies.DDPStrategy` with fused kernels and a fused loss.

    Args:
        **kwargs: ``kernels``, ``on_nonfinite_grad``, ``context_parallel_size``, ``activation_checkpointing``,
            ``memory_budget``, ``fault_tolerance`` and ``compile`` as in :class:`~lightning_liger.LigerFSDPStrategy`;
            ``cuda_graphs=True`` replays layers from CUDA graphs; others as in Lightning's strategy.

    Raises:
        TypeError: For an argument that neither Lightning's strategy nor ``DistributedDataParallel`` has.
        ValueError: For an unknown kernel or ``on_nonfinite_grad``.
    """

    strategy_name = "liger_ddp"
    _wrapper = DistributedDataParallel
    _holds_frozen = True
    _keeps_parameters = True


class FabricLigerDDPStrategy(FabricStrategy, fabric_ddp.DDPStrategy):
    """:class:`LigerDDPStrategy` for Fabric.

    Takes the same arguments, except for ``on_nonfinite_grad`` and ``context_parallel_size``.
    """

    _wrapper = DistributedDataParallel
    _holds_frozen = True
    _keeps_parameters = True

    @override
    def setup_module(self, module: Module) -> DistributedDataParallel:
        wrapped: Any = super().setup_module(module)
        if wrapped.find_unused_parameters or wrapped.static_graph:
            # DDP follows the graph from the output, or waits for the first backward to enter it. A head's parameters
            # are in no graph yet: backward would fail, or leave the gradients of the first step as they are.
            HIDDEN_STATES.expose_within(wrapped, wrapped.module)
        return wrapped
