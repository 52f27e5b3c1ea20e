"""``context_parallel_size``: several ranks of a Trainer's strategy share each sequence."""

from typing import Any

import lightning as L

from lightning_liger.sequences.context_parallel import ContextParallel, check_size


class SharesSequences:
    """Placed before a strategy of the Trainer's, lets ``context_parallel_size`` consecutive ranks share sequences.

    They get the same batches, of which the steps of :class:`~lightning_liger.LigerLMMixin` give each its piece.
    Parameters are replicated or sharded over all ranks as ever. Not in ``predict``, whose rows stay whole.
    """

    context_parallel: ContextParallel | None
    num_nodes: int
    num_processes: int
    world_size: int
    lightning_module: Any

    def __init__(self, *args: Any, context_parallel_size: int = 1, **kwargs: Any) -> None:
        check_size(context_parallel_size, context_parallel_size)
        self.context_parallel_size = context_parallel_size
        self.context_parallel = None
        super().__init__(*args, **kwargs)

    def setup_environment(self) -> None:
        check_size(self.context_parallel_size, self.num_nodes * self.num_processes)
        super().setup_environment()  # type: ignore[misc]
        replicas = super().distributed_sampler_kwargs["num_replicas"]  # type: ignore[misc]
        if self.context_parallel_size > 1 and replicas != self.world_size:
            raise ValueError(
                f"context_parallel_size={self.context_parallel_size} cannot be combined with tensor parallelism:"
                f" {self.world_size} processes are {replicas} data-parallel ones"
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Lightning's own, with one replica for each group of ranks that share sequences."""
        options = super().distributed_sampler_kwargs  # type: ignore[misc]
        size = self.context_parallel_size
        return {"num_replicas": options["num_replicas"] // size, "rank": options["rank"] // size}

    def setup(self, trainer: L.Trainer) -> None:
        if self.context_parallel_size > 1 and not trainer.predicting:
            self.context_parallel = self.context_parallel or ContextParallel(self.context_parallel_size)
            self.context_parallel.apply(self.lightning_module)
        else:
            ContextParallel.undo(self.lightning_module)
        super().setup(trainer)  # type: ignore[misc]
