"""``liger_ddp``: Distributed Data Parallel with fused kernels, for Trainer and Fabric."""

from typing import Any

import lightning.fabric.strategies.ddp as fabric_ddp
import lightning.pytorch.strategies.ddp as pytorch_ddp
import torch.distributed as dist
from lightning.fabric.strategies import _StrategyRegistry
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.strategies.parts.clipping import TrainerClipping
from lightning_liger.strategies.parts.head_units import connected_hidden_states
from lightning_liger.strategies.parts.kernels import FabricKernels, TrainerKernels
from lightning_liger.strategies.parts.shared_sequences import SharesSequences

_NAME = "liger_ddp"
_DESCRIPTION = "Distributed Data Parallel (DDP) with fused kernels and a loss without logits"


class _FusedDDP:
    """What the Trainer's and Fabric's strategies share; placed before Lightning's class."""

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        if not dist.is_available() or _NAME in strategy_registry:
            return
        strategy_registry.register(_NAME, cls, description=_DESCRIPTION)
        strategy_registry.register(
            f"{_NAME}_find_unused_parameters_true",
            cls,
            description=f"{_DESCRIPTION}, for models some parameters of which a loss may not need",
            find_unused_parameters=True,
        )


class LigerDDPStrategy(_FusedDDP, SharesSequences, TrainerKernels, TrainerClipping, pytorch_ddp.DDPStrategy):
    """Lightning's :class:`~lightning.pytorch.strategies.DDPStrategy` with fused kernels and a fused loss.

    Args:
        kernels: ``"auto"``, ``"none"``, a list of names or a dict with options; see
            :func:`~lightning_liger.apply_liger_kernels`.
        on_nonfinite_grad: What to do in a step whose gradients' norm is infinite or NaN, as in
            :class:`~lightning_liger.LigerStrategy`. The norm before clipping is logged as ``grad_norm``.
        context_parallel_size: Ranks that share each sequence; see :class:`~lightning_liger.ContextParallel`.
        **kwargs: As in Lightning's strategy.

    Raises:
        ValueError: For an unknown kernel or ``on_nonfinite_grad``.
    """

    strategy_name = _NAME

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Names this strategy where Lightning advises one of its own, which would do without the kernels."""
        before = exception.args
        super().on_exception(exception)
        if exception.args != before:
            exception.args = tuple(
                arg.replace("'ddp_", f"'{_NAME}_").replace("=DDPStrategy(", f"={type(self).__name__}(")
                for arg in exception.args
            )


class FabricLigerDDPStrategy(_FusedDDP, FabricKernels, fabric_ddp.DDPStrategy):
    """:class:`LigerDDPStrategy` for Fabric; takes the same arguments."""

    @override
    def setup_module(self, module: Module) -> DistributedDataParallel:
        module = super().setup_module(module)
        if module.find_unused_parameters or module.static_graph:
            module.__class__ = _LazyLogitsDDP  # Lightning's set-up makes DDP's own class
        return module


class _LazyLogitsDDP(DistributedDataParallel):
    """DDP that knows what lazy logits in the module's output depend on.

    To find unused parameters it follows the graph behind the output's tensors, and for a static graph it has to see
    the first backward enter the module. Lazy logits are no tensor, and their head's parameters are in no graph yet:
    backward would fail, or leave the gradients of a static graph's first step as they are on each rank.
    """

    # Private to DDP, which has no public hook between its module and what it makes of the output.
    def _post_forward(self, output: Any) -> Any:
        leaves, structure = tree_flatten(output)
        leaves = [_real_if_overwritten(leaf) for leaf in leaves]
        tensors = super()._post_forward(
            [connected_hidden_states(leaf) if isinstance(leaf, LazyLogits) else leaf for leaf in leaves]
        )
        leaves = [
            leaf.changed(hidden_states=tensor) if isinstance(leaf, LazyLogits) else tensor
            for leaf, tensor in zip(leaves, tensors, strict=True)
        ]
        return tree_unflatten(leaves, structure)


def _real_if_overwritten(leaf: Any) -> Any:
    return leaf.materialize() if isinstance(leaf, LazyLogits) and leaf._is_overwritten() else leaf
