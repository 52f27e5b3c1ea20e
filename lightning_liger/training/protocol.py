"""A strategy, ours or another, as the module that it trains sees it."""

from collections.abc import Iterable, Iterator
from typing import cast

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_liger.sequences.context_parallel import ContextParallel


class Engine:
    """What :class:`~lightning_liger.LigerLMMixin` asks a strategy; of one that leaves gradients to the parameters."""

    initializes_on_meta = False
    """Whether models may be built on the meta device."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    @property
    def context_parallel(self) -> ContextParallel | None:
        """The group of ranks that share each sequence, None if ranks do not share sequences."""
        return getattr(self.strategy, "context_parallel", None)

    @property
    def scales_gradients(self) -> bool:
        """Whether :meth:`scale_gradients` reaches the gradients that the next optimizer step uses."""
        return not self.strategy.handles_gradient_accumulation  # in buffers that parameters do not show

    def micro_batch_index(self) -> int:
        """The index of the current micro-batch in its optimizer step; Lightning zeroes gradients at 0."""
        return self._trainer.fit_loop.epoch_loop.batch_idx % self._trainer.accumulate_grad_batches

    def should_accumulate(self) -> bool:
        """Whether more micro-batches follow before the optimizer steps."""
        num_ready = self._trainer.fit_loop.epoch_loop.batch_idx + 1
        # The last batch of an epoch steps too, whose number may be unknown until then.
        is_last = num_ready == self._trainer.num_training_batches or self._trainer.is_last_batch
        is_within = num_ready % self._trainer.accumulate_grad_batches != 0
        return is_within and (self.strategy.handles_gradient_accumulation or not is_last)

    @property
    def _trainer(self) -> L.Trainer:
        return cast(L.LightningModule, self.strategy.lightning_module).trainer

    def scale_gradients(self, parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
        """Multiplies the gradients that the next optimizer step uses by ``factor``, before they are clipped."""
        gradients: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in local_gradients(parameters):
            gradients.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, _), same in gradients.items():
            torch._foreach_mul_(same, factor.to(device, torch.float32))


def engine_of(trainer: L.Trainer) -> Engine:
    """The Trainer's strategy as the module sees it."""
    engine = getattr(trainer.strategy, "engine", None)
    return engine if isinstance(engine, Engine) else Engine(trainer.strategy)


def local_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """Those that are there, of DTensors this rank's part."""
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return (each.to_local() if isinstance(each, DTensor) else each for each in gradients)
