"""The mean over the items (tokens, pairs) of all micro-batches and ranks of an optimizer step, however they were split.

The loss of a micro-batch, its own mean, is multiplied by its share of the step where it is differentiated. With one
micro-batch in a step the share is known by then. Of several, each is weighted relative to the first one, and after the
last backward the gradients are multiplied by what is missing, before any hook of a callback or module.
"""

from collections.abc import Iterator
from typing import cast

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_liger.training.protocol import engine_of, local_gradients

_NO_ITEMS = 2.0**-40  # the weight of a micro-batch without items: what was added to its loss keeps a gradient
_REMEDY = "set loss_normalization='micro_batch' for the mean of the micro-batches' means, or accumulate_grad_batches=1"


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
    """Weights the losses of one optimizer step so that its gradients are those of the mean over all of its items."""

    def __init__(self) -> None:
        self._batch = self._first_batch = -1
        self._added: Tensor | None = None  # of this batch: the sum of losses and the number of items, in float64
        self._step: Tensor | None = None  # of all micro-batches of the step that reached backward
        self._reference: Tensor | None = None  # the number of items of a micro-batch with weight 1
        self._num_backwards = 0
        self._num_batches: int | None = None
        self._is_scaled = self._is_first = True
        self._loss: Tensor | None = None

    def add(self, trainer: L.Trainer, loss: Tensor, num_items: Tensor, num_batches: int | None = None) -> None:
        """Adds items whose mean loss is about to be differentiated; it would be another without ``num_batches``."""
        batch = trainer.fit_loop.epoch_loop.total_batch_idx
        items = num_items.detach().double().masked_fill(num_items == 0, _NO_ITEMS)
        added = torch.stack((loss.detach().double() * items, items))
        # What was added for another batch never reached backward.
        self._added = added if self._added is None or batch != self._batch else self._added + added
        self._batch, self._num_batches = batch, num_batches

    def weight(self, module: L.LightningModule) -> Tensor | None:
        """What to multiply the loss of a batch by before its backward, a scalar; None for 1. A collective."""
        batch = self._begin(module.trainer)
        added, self._added = self._added if batch == self._batch else None, None
        self._num_backwards += 1
        if self._step is None:
            return None if added is None else self._first_weight(module, added)
        if added is None:
            raise _mixed(module)
        self._step = self._step + added
        return added[1] / cast(Tensor, self._reference)

    def _begin(self, trainer: L.Trainer) -> int:
        """The number of the batch that is trained on, which may be in another step than those so far."""
        batch = trainer.fit_loop.epoch_loop.total_batch_idx
        first_batch = batch - engine_of(trainer).micro_batch_index()
        if first_batch != self._first_batch:
            self._first_batch, self._step, self._loss, self._num_backwards = first_batch, None, None, 0
        return batch

    def _first_weight(self, module: L.LightningModule, added: Tensor) -> Tensor | None:
        trainer, engine = module.trainer, engine_of(module.trainer)
        if self._num_backwards > 1:
            raise _mixed(module)
        self._is_scaled = engine.should_accumulate()
        zeroes_itself = type(module).optimizer_zero_grad is not L.LightningModule.optimizer_zero_grad
        may_hold = self._is_scaled and (self._is_first or zeroes_itself)
        if may_hold and any(bool(gradient.any()) for gradient in local_gradients(_parameters(trainer))):
            raise _mixed(module)
        steps_inside = any(parameter._post_accumulate_grad_hooks for parameter in _parameters(trainer))
        if self._is_scaled and not engine.strategy.handles_gradient_accumulation and steps_inside:
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

    def finish(self, module: L.LightningModule) -> Tensor | None:
        """Makes gradients those of the mean over the step after its last micro-batch, and returns it. A collective.

        None if more micro-batches follow, or none had a loss.
        """
        trainer, engine = module.trainer, engine_of(module.trainer)
        if engine.should_accumulate():
            return None
        self._begin(trainer)
        step, self._step = self._step, None
        if step is not None and self._num_batches not in (None, self._num_backwards):
            raise RuntimeError(
                f"{type(module).__name__}.training_step must not skip a batch: the loss has several kinds of items,"
                f" whose numbers in all {self._num_batches} batches of the step it was divided by;"
                f" {self._num_backwards} of them were trained on"
            )
        if step is not None and self._is_scaled:
            total = sum_over_ranks(trainer, step)
            self._loss = total[0] / total[1]
            num_parts = trainer.accumulate_grad_batches * trainer.world_size
            engine.scale_gradients(_parameters(trainer), num_parts * cast(Tensor, self._reference) / total[1])
        if trainer.accumulate_grad_batches == 1:
            self._num_backwards = 0  # optimizers such as LBFGS run the whole step again
        return self._loss


def _parameters(trainer: L.Trainer) -> Iterator[nn.Parameter]:
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _mixed(module: L.LightningModule) -> RuntimeError:
    return RuntimeError(
        f"{type(module).__name__} must take all losses of an optimizer step from the inherited training_step, got"
        " others, or gradients from before the step, among its accumulated micro-batches: these have no number of"
        f" items by which they could be weighted. Add terms to the inherited loss, or {_REMEDY}"
    )
