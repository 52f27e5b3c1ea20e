"""Base of the mixins whose loss does not depend on how a step was split over micro-batches and ranks."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import lightning as L
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from liger_ops.arguments import check_choice
from lightning_liger.training.language_model import LanguageModel
from lightning_liger.training.metrics import ShownLoss
from lightning_liger.training.protocol import engine_of
from lightning_liger.training.token_mean import TokenMean

if TYPE_CHECKING:
    _Module = L.LightningModule
else:
    _Module = object

STAGES = ("train", "val", "test")
_LOSS = "train_loss_step"


class LigerStepMixin(_Module):
    """Hooks that make gradients those of the mean over a whole optimizer step, and the model as steps see it.

    A step of training adds its sum of losses and the number of units (tokens, pairs) with ``self._token_mean.add``.
    """

    model: nn.Module
    loss_normalization: str = "tokens"
    _normalizations: tuple[str, ...] = ("tokens", "micro_batch")
    """The values of ``loss_normalization``; the first is the mean over a whole optimizer step."""
    _units = "tokens"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if L.LightningModule in order:
            late = [base for base in order[order.index(L.LightningModule) :] if issubclass(base, LigerStepMixin)]
            if late:
                name = late[0].__name__
                raise TypeError(
                    f"{cls.__name__} must list {name} before LightningModule:"
                    f" class {cls.__name__}({name}, L.LightningModule)"
                )
        hook = getattr(cls, "configure_model", None)
        if hook not in (None, L.LightningModule.configure_model) and not hasattr(hook, "_notes_the_model"):
            cls.configure_model = _noting_the_model(hook)  # type: ignore[method-assign]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_choice("loss_normalization", self.loss_normalization, self._normalizations)
        self._token_mean = TokenMean()
        self._language_model: LanguageModel | None = None
        self._is_configured = False
        self._replaced_model: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no submodule
        self.shown_loss = ShownLoss()

    @torch.compiler.disable  # looks at the signatures of modules
    def _seen_model(self) -> LanguageModel:
        if self._language_model is None or self._language_model.model is not self.model:
            self._language_model = LanguageModel(self.model)
        return self._language_model

    def _note_replacement(self, before: nn.Module | None) -> None:
        """Remembers a model that ``configure_model`` replaced by another in a later stage."""
        after = getattr(self, "model", None)
        if self._is_configured and before is not None and after is not before:
            is_wrapped = isinstance(after, nn.Module) and any(part is before for part in after.modules())
            self._replaced_model = () if is_wrapped else (before,)
        self._is_configured = True

    def _refuse_replaced_model(self) -> None:
        """Raises RuntimeError, and restores the model, if a stage would run on another one than the stage before it."""
        if not self._replaced_model:
            return
        (before,), self._replaced_model = self._replaced_model, ()
        if self._trainer is not None and self.trainer.ckpt_path is not None:  # the weights are those of the checkpoint
            return
        self.model = before
        name = type(self).__name__
        raise RuntimeError(
            f"{name}.configure_model must keep self.model, got a new {type(before).__name__} without the weights so"
            " far: Lightning calls the hook for each stage (fit, validate, test, predict). Begin it with `if"
            " getattr(self, 'model', None) is not None: return`, or set self.model = None before a stage that is to"
            " start anew. self.model is the former model again"
        )

    def _context_parallel_shard(self, stage: str, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's part of the rows under context parallelism, else all of them."""
        context = None if self._trainer is None else engine_of(self.trainer).context_parallel
        if context is None:
            return batch
        if stage == "train" and not self._normalizes_steps():
            raise ValueError(
                f"context_parallel_size needs loss_normalization={self._normalizations[0]!r} and automatic"
                " optimization: ranks hold pieces with different numbers of labels, got"
                f" loss_normalization={self.loss_normalization!r} and"
                f" automatic_optimization={self.automatic_optimization}"
            )
        return context.split(batch)

    def _normalizes_steps(self) -> bool:
        """Whether gradients become those of the step's mean; not where an engine gives no access to them."""
        if self.loss_normalization == "micro_batch" or self._trainer is None or not self.automatic_optimization:
            return False
        engine = engine_of(self.trainer)
        return not engine.handles_gradient_accumulation or engine.scales_gradients

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._refuse_replaced_model()

    def on_test_start(self) -> None:
        super().on_test_start()
        self._refuse_replaced_model()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._refuse_replaced_model()

    def on_train_start(self) -> None:
        super().on_train_start()
        self._refuse_replaced_model()
        self._token_mean.reset()
        self.shown_loss.forget()
        if self.loss_normalization != "micro_batch" and self.automatic_optimization and not self._normalizes_steps():
            rank_zero_warn(
                f"{type(self.trainer.strategy).__name__} gives no access to its gradients: the training loss is the"
                f" mean of the means of micro-batches and ranks, whatever their numbers of {self._units}. Use"
                f" 'liger_deepspeed_stage_2' or '_3' for the mean over {self._units}, or set loss_normalization ="
                " 'micro_batch' if you do not want it."
            )

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        # An engine that accumulates by itself finishes the last step of an epoch in the next epoch.
        if not engine_of(self.trainer).handles_gradient_accumulation:
            self._token_mean.reset()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        # Of both entries with this name, the later one is in callback_metrics: the exact one, on the device.
        self.log(_LOSS, self.shown_loss, prog_bar=True, logger=False, on_step=True, on_epoch=False)
        return super().on_train_batch_start(batch, batch_idx)

    def on_after_backward(self) -> None:
        super().on_after_backward()
        # Not in a hook of the optimizer's step, where callbacks, which may look at gradients, run first.
        if self._token_mean.is_empty:
            return
        strategy, engine = self.trainer.strategy, engine_of(self.trainer)
        if engine.should_accumulate():
            return
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        loss = self._token_mean.normalize(
            (parameter for group in groups for parameter in group["params"]),
            num_micro_batches=self.trainer.accumulate_grad_batches,
            num_ranks=self.trainer.world_size,
            sum_over_ranks=lambda tensor: cast(Tensor, strategy.reduce(tensor, reduce_op="sum")),
            scale=engine.scale_gradients,
        )
        self._log_step(loss)

    def forget_micro_batches(self) -> None:
        """Forgets the tokens that were counted since the last optimizer step, for an engine that repeats a step."""
        self._token_mean.reset()

    def _log_step(self, loss: Tensor) -> None:
        self.shown_loss.show(loss)
        self.log(_LOSS, loss, on_step=True, on_epoch=False)


def _noting_the_model(configure_model: Callable[..., None]) -> Callable[..., None]:
    """``configure_model`` that notes whether it replaced the model of an earlier stage."""

    @functools.wraps(configure_model)
    def configure(self: LigerStepMixin) -> None:
        before = getattr(self, "model", None)
        configure_model(self)
        self._note_replacement(before)

    configure._notes_the_model = True  # type: ignore[attr-defined]
    return configure
