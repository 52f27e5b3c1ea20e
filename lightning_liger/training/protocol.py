"""The protocol between a module and the strategy that trains it, whether ours or another."""

from collections.abc import Iterable
from typing import Any, Protocol, cast, runtime_checkable

import lightning as L
from torch import Tensor, nn

from lightning_liger.patching import PatchReport
from lightning_liger.sequences.context_parallel import ContextParallel
from lightning_liger.training.step_mean import scale_gradients


@runtime_checkable
class TrainingEngine(Protocol):
    """The names through which :class:`~lightning_liger.LigerLMMixin`, callbacks and strategies talk to each other."""

    @property
    def context_parallel(self) -> ContextParallel | None:
        """The group of ranks that share each sequence, None if ranks do not share sequences."""

    @property
    def materializes(self) -> bool:
        """Whether models may be built on the meta device."""

    @property
    def patch_report(self) -> PatchReport | None:
        """The report of replaced modules, None before the model was set up."""

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether the engine accumulates gradients itself, in buffers that parameters do not show."""

    @property
    def scales_gradients(self) -> bool:
        """Whether :meth:`scale_gradients` reaches the gradients that the next optimizer step uses."""

    def micro_batch_index(self) -> int:
        """The index of the current micro-batch in its optimizer step."""

    def should_accumulate(self) -> bool:
        """Whether more micro-batches follow before the optimizer steps."""

    def scale_gradients(self, parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
        """Multiplies the gradients that the next optimizer step uses by ``factor``, before they are clipped."""


class EngineDefaults:
    """:class:`TrainingEngine` of a strategy that leaves gradients to the parameters. A mixin of our strategies."""

    lightning_module: L.LightningModule | None
    context_parallel: ContextParallel | None = None
    handles_gradient_accumulation: bool
    materializes = False

    @property
    def scales_gradients(self) -> bool:
        return not self.handles_gradient_accumulation

    def micro_batch_index(self) -> int:
        # As Lightning, which zeroes gradients at 0, whatever became of the step before.
        return self._epoch_loop.batch_idx % self._epoch_loop.trainer.accumulate_grad_batches

    def should_accumulate(self) -> bool:
        # Lightning's only account of it: the last batch of an epoch steps too, whose number may be unknown until then.
        return self._epoch_loop._should_accumulate()

    @property
    def _epoch_loop(self) -> Any:
        if self.lightning_module is None:
            raise RuntimeError(f"{type(self).__name__} needs a Trainer that is fitting")
        return self.lightning_module.trainer.fit_loop.epoch_loop

    def scale_gradients(self, parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
        scale_gradients(parameters, factor)


class _ForeignEngine(EngineDefaults):
    """A strategy that is not ours."""

    patch_report = None

    def __init__(self, strategy: L.pytorch.strategies.Strategy) -> None:
        self.lightning_module = strategy.lightning_module
        self.handles_gradient_accumulation = strategy.handles_gradient_accumulation


def engine_of(trainer: L.Trainer) -> TrainingEngine:
    """The Trainer's strategy as the module sees it."""
    strategy = trainer.strategy
    # Ours are recognised in less than a microsecond; looking for every name of the protocol takes ten.
    is_engine = isinstance(strategy, EngineDefaults) or isinstance(strategy, TrainingEngine)  # noqa: SIM101
    return cast(TrainingEngine, strategy) if is_engine else _ForeignEngine(strategy)
