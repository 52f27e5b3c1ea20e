"""The protocol between a module and the strategy that trains it, whether ours or another."""

from collections.abc import Iterable
from typing import Any

import lightning as L
from torch import Tensor, nn

from lightning_liger.sequences.context_parallel import ContextParallel
from lightning_liger.training.step_mean import scale_gradients


class EngineDefaults:
    """What a module asks of the strategy that trains it, for one that leaves gradients to the parameters.

    A mixin of our strategies.
    """

    lightning_module: L.LightningModule | None
    context_parallel: ContextParallel | None = None
    """The group of ranks that share each sequence, None if ranks do not share sequences."""
    handles_gradient_accumulation: bool
    """Whether the engine accumulates gradients itself, in buffers that parameters do not show."""
    materializes = False
    """Whether models may be built on the meta device."""

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
        if self.lightning_module is None:
            raise RuntimeError(f"{type(self).__name__} needs a Trainer that is fitting")
        return self.lightning_module.trainer.fit_loop.epoch_loop

    def scale_gradients(self, parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
        """Multiplies the gradients that the next optimizer step uses by ``factor``, before they are clipped."""
        scale_gradients(parameters, factor)


class _ForeignEngine(EngineDefaults):
    """A strategy that is not ours."""

    def __init__(self, strategy: L.pytorch.strategies.Strategy) -> None:
        self.lightning_module = strategy.lightning_module
        self.handles_gradient_accumulation = strategy.handles_gradient_accumulation


def engine_of(trainer: L.Trainer) -> EngineDefaults:
    """The Trainer's strategy as the module sees it."""
    strategy = trainer.strategy
    return strategy if isinstance(strategy, EngineDefaults) else _ForeignEngine(strategy)
