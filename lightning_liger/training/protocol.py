"""A strategy, ours or another, as the module that it trains sees it."""

from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_liger.sequences.context_parallel import ContextParallel
from lightning_liger.training.step_mean import scale_gradients


class Engine:
    """What :class:`~lightning_liger.LigerLMMixin` asks a strategy; of one that leaves gradients to the parameters."""

    materializes = False
    """Whether models may be built on the meta device."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    @property
    def context_parallel(self) -> ContextParallel | None:
        """The group of ranks that share each sequence, None if ranks do not share sequences."""
        return getattr(self.strategy, "context_parallel", None)

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether the strategy accumulates gradients itself, in buffers that parameters do not show."""
        return self.strategy.handles_gradient_accumulation

    @property
    def scales_gradients(self) -> bool:
        """Whether :meth:`scale_gradients` reaches the gradients that the next optimizer step uses."""
        return not self.handles_gradient_accumulation

    def micro_batch_index(self) -> int:
        """The index of the current micro-batch in its optimizer step."""
        # As Lightning, which zeroes gradients at 0, whatever became of the step before.
        return self._epoch_loop.batch_idx % self._epoch_loop.trainer.accumulate_grad_batches

    def should_accumulate(self) -> bool:
        """Whether more micro-batches follow before the optimizer steps."""
        # Lightning's only account of it: the last batch of an epoch steps too, whose number may be unknown until then.
        return self._epoch_loop._should_accumulate()

    @property
    def _epoch_loop(self) -> Any:
        module = self.strategy.lightning_module
        if module is None:
            raise RuntimeError(f"{type(self.strategy).__name__} needs a Trainer that is fitting")
        return module.trainer.fit_loop.epoch_loop

    def scale_gradients(self, parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
        """Multiplies the gradients that the next optimizer step uses by ``factor``, before they are clipped."""
        scale_gradients(parameters, factor)


def engine_of(trainer: L.Trainer) -> Engine:
    """The Trainer's strategy as the module sees it."""
    engine = getattr(trainer.strategy, "engine", None)
    return engine if isinstance(engine, Engine) else Engine(trainer.strategy)
