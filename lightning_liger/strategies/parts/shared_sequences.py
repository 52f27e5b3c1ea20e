"""``context_parallel_size``: several ranks of a Trainer's strategy share each sequence."""

from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.strategies import ParallelStrategy

from lightning_liger.sequences.context_parallel import ContextParallel, check_size

if TYPE_CHECKING:
    _Strategy = ParallelStrategy
else:
    _Strategy = object


class SharesSequences(_Strategy):
    """Lets ``context_parallel_size`` consecutive ranks share sequences. A mixin for the Trainer's strategies.

    These ranks get the same batches, and the steps of :class:`~lightning_liger.LigerLMMixin` take each rank's shard of
    the rows. Parameters are still replicated or sharded over all ranks. In ``predict`` rows stay whole.

    Args:
        context_parallel_size: Ranks that share each sequence; see :class:`~lightning_liger.ContextParallel`.
    """

    def __init__(self, *args: Any, context_parallel_size: int = 1, **kwargs: Any) -> None:
        check_size(context_parallel_size, context_parallel_size)
        self.context_parallel_size = context_parallel_size
        self.context_parallel: ContextParallel | None = None
        super().__init__(*args, **kwargs)

    def setup_environment(self) -> None:
        check_size(self.context_parallel_size, self._num_expected_processes)
        super().setup_environment()
        replicas = super().distributed_sampler_kwargs["num_replicas"]
        if self.context_parallel_size > 1 and replicas != self.world_size:
            raise ValueError(
                f"context_parallel_size={self.context_parallel_size} cannot be combined with tensor parallelism:"
                f" {self.world_size} processes are {replicas} data-parallel ones"
            )

    @property
    def _num_expected_processes(self) -> int:
        """The number of processes before they are launched."""
        return self.num_nodes * self.num_processes  # type: ignore[attr-defined]  # no common base of Lightning's has them

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Lightning's, with one replica for each group of ranks that share sequences."""
        options = super().distributed_sampler_kwargs
        size = self.context_parallel_size
        return {"num_replicas": options["num_replicas"] // size, "rank": options["rank"] // size}

    def setup(self, trainer: L.Trainer) -> None:
        assert self.lightning_module is not None
        if self.context_parallel_size > 1 and not trainer.predicting:
            self.context_parallel = self.context_parallel or ContextParallel(self.context_parallel_size)
            self.context_parallel.apply(self.lightning_module)
        else:
            ContextParallel.undo(self.lightning_module)
        super().setup(trainer)
