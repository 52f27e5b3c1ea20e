"""The mean over the units (tokens, pairs) of all micro-batches and ranks of an optimizer step, however they were split.

Micro-batches and ranks hold different numbers of units, so the mean of their means is not the mean over units. The loss
of a micro-batch is its own mean, with that mean's gradient. Where it is differentiated, in ``backward`` of the
Trainer's precision plugin, it is multiplied by the micro-batch's share of the step. With one micro-batch in a step the
share is known by then. Of several, each is weighted relative to the first one, so that gradients have about their final
scale, and after the last backward the gradients are multiplied by what is missing, before any hook of a callback or
module.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_NO_UNITS = 2.0**-40  # the weight of a micro-batch without units: what was added to its loss keeps a gradient
_REMEDY = "set loss_normalization='micro_batch' for the mean of the micro-batches' means, or accumulate_grad_batches=1"


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiplies the gradients of ``parameters``, DTensors included, by a number in float32, in place."""
    gradients: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in _gradients(parameters):
        gradients.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), same in gradients.items():
        torch._foreach_mul_(same, factor.to(device, torch.float32))


def sum_over_ranks(trainer: L.Trainer, tensor: Tensor) -> Tensor:
    """The sum over all ranks. Unlike that of Lightning's strategies, the host does not wait for it."""
    if trainer.world_size == 1:
        return tensor
    if not dist.is_initialized():
        return cast(Tensor, trainer.strategy.reduce(tensor, reduce_op="sum"))
    total = tensor.clone()
    dist.all_reduce(total)
    return total


class StepMean:
    """Weights the losses of one optimizer step so that its gradients are those of the mean over all of its units."""

    def __init__(self) -> None:
        self._batch = self._first_batch = -1
        self._added: Tensor | None = None  # of this batch: the sum of losses and the number of units, in float64
        self._step: Tensor | None = None  # of all micro-batches of the step that reached backward
        self._reference: Tensor | None = None  # the number of units of a micro-batch with weight 1
        self._num_backwards = 0
        self._num_batches: int | None = None
        self._is_scaled = self._is_first = True
        self._loss: Tensor | None = None

    def add(self, batch: int, loss: Tensor, num_units: Tensor, num_batches: int | None = None) -> None:
        """Adds units whose loss is about to be differentiated.

        Args:
            batch: The number of the batch that they are from. What was added for another one never reached backward.
            loss: Their mean, a scalar.
            num_units: Their number, a scalar.
            num_batches: Without which the loss would be another: of the step, as far as is known.
        """
        units = num_units.detach().double().masked_fill(num_units == 0, _NO_UNITS)
        added = torch.stack((loss.detach().double() * units, units))
        self._added = added if self._added is None or batch != self._batch else self._added + added
        self._batch, self._num_batches = batch, num_batches

    def weight(self, module: L.LightningModule, engine: Any, batch: int) -> Tensor | None:
        """What to multiply the loss of a batch by before its backward, a scalar; None for 1. A collective.

        Raises:
            RuntimeError: If gradients of the step are there already that are not weighted by units, or if an optimizer
                steps inside of backward before the share is known.
        """
        added, self._added = self._added if batch == self._batch else None, None
        self._begin(engine, batch)
        self._num_backwards += 1
        if self._step is None and added is not None:
            return self._first_weight(module, engine, added)
        if added is None:
            if self._step is not None:
                raise _mixed(module)
            return None
        self._step = cast(Tensor, self._step) + added
        return added[1] / cast(Tensor, self._reference)

    def _begin(self, engine: Any, batch: int) -> None:
        first_batch = batch - engine.micro_batch_index()
        if first_batch != self._first_batch:
            self._first_batch, self._step, self._loss, self._num_backwards = first_batch, None, None, 0

    def _first_weight(self, module: L.LightningModule, engine: Any, added: Tensor) -> Tensor | None:
        trainer = module.trainer
        if self._num_backwards > 1:
            raise _mixed(module)
        self._is_scaled = engine.should_accumulate()
        zeroes_itself = type(module).optimizer_zero_grad is not L.LightningModule.optimizer_zero_grad
        may_hold = self._is_scaled and (self._is_first or zeroes_itself)
        if may_hold and any(bool(gradient.any()) for gradient in _gradients(_parameters(trainer))):
            raise _mixed(module)
        steps_inside = any(parameter._post_accumulate_grad_hooks for parameter in _parameters(trainer))
        if self._is_scaled and not engine.handles_gradient_accumulation and steps_inside:
            raise RuntimeError(
                "an optimizer that steps inside backward (register_post_accumulate_grad_hook) cannot wait for the last"
                f" micro-batch of a step: {_REMEDY}"
            )
        total = sum_over_ranks(trainer, added)
        mean = total[1] / trainer.world_size
        self._is_first, self._step, self._loss = False, added, total[0] / total[1]
        self._reference = mean.clamp(min=1) if self._is_scaled else mean / trainer.accumulate_grad_batches
        if not self._is_scaled and trainer.accumulate_grad_batches == trainer.world_size == 1:
            return None
        return added[1] / self._reference

    def finish(self, module: L.LightningModule, engine: Any, batch: int) -> Tensor | None:
        """Makes gradients those of the mean over the step, once its last micro-batch has passed. A collective.

        Returns:
            That mean; None if more micro-batches follow, or none had a loss.

        Raises:
            RuntimeError: If a batch was skipped that the others' losses depend on.
        """
        if engine.should_accumulate():
            return None
        self._begin(engine, batch)
        trainer, step, self._step = module.trainer, self._step, None
        if step is not None and self._num_batches not in (None, self._num_backwards):
            raise RuntimeError(
                f"{type(module).__name__}.training_step must not skip a batch: the loss has several units, whose"
                f" numbers in all {self._num_batches} batches of the step it was divided by; {self._num_backwards} of"
                " them were trained on"
            )
        if step is not None and self._is_scaled:
            total = sum_over_ranks(trainer, step)
            self._loss = total[0] / total[1]
            num_parts = trainer.accumulate_grad_batches * trainer.world_size
            engine.scale_gradients(_parameters(trainer), num_parts * cast(Tensor, self._reference) / total[1])
        return self._loss


def _parameters(trainer: L.Trainer) -> Iterator[nn.Parameter]:
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _gradients(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return (each.to_local() if isinstance(each, DTensor) else each for each in gradients)


def _mixed(module: L.LightningModule) -> RuntimeError:
    return RuntimeError(
        f"{type(module).__name__} must take all losses of an optimizer step from the inherited training_step, got"
        " others, or gradients from before the step, among its accumulated micro-batches: these have no number of"
        f" units by which they could be weighted. Add terms to the inherited loss, or {_REMEDY}"
    )
