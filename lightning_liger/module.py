"""What turns a LightningModule with a language model into one that trains on its fused loss."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn

from liger_ops import IGNORE_INDEX
from lightning_liger.lazy_logits import LazyLogits, lazy_logits
from lightning_liger.metrics import TokenMetrics
from lightning_liger.token_mean import TokenMean

_STAGES = ("train", "val", "test")
_NORMALIZATIONS = ("tokens", "micro_batch")


class LMLoss(NamedTuple):
    """The loss of one batch and what the metrics need of it."""

    loss: Tensor
    """Mean over the tokens that are not ignored, a differentiable scalar."""
    loss_sum: Tensor
    """Their sum, likewise."""
    num_tokens: Tensor
    """Tokens that are not ignored."""
    num_correct: Tensor
    """Tokens whose label has the largest logit."""


class LigerLMMixin:
    """Training, validation and test steps of a causal language model on a loss that never makes the logits.

    Put it before the base class and the model into ``self.model``::

        class LM(LigerLMMixin, L.LightningModule):
            def configure_model(self):
                self.model = AutoModelForCausalLM.from_config(config)

    The steps expect batches with ``labels`` (unshifted, as Hugging Face's) and pass everything else to the model. They
    log ``{train,val,test}_{loss,perplexity,accuracy}``, averaged over tokens. Override them as you like::

        def training_step(self, batch, batch_idx):
            labels = batch.pop("labels")
            return self.lm_loss(self.model(**batch).logits, labels)

    The training loss is the mean over the target tokens of a whole optimizer step: gradients do not depend on how
    tokens were split over accumulated micro-batches and ranks. With ``loss_normalization = "micro_batch"`` in the class
    they are the mean of the micro-batches' means, as those of a training step of your own.

    The loss is fused when the model's head was patched, which the ``liger`` strategies, ``LigerCallback`` and
    :func:`~lightning_liger.apply_liger_kernels` do; otherwise the steps work on whole logits.

    Raises:
        TypeError: When a class lists the mixin behind ``LightningModule``.
        ValueError: For an unknown ``loss_normalization``.
    """

    model: nn.Module
    loss_normalization: str = "tokens"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if L.LightningModule in order and order.index(L.LightningModule) < order.index(LigerLMMixin):
            raise TypeError(
                f"{cls.__name__} must list LigerLMMixin before LightningModule:"
                f" class {cls.__name__}(LigerLMMixin, L.LightningModule)"
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.loss_normalization not in _NORMALIZATIONS:
            raise ValueError(f"loss_normalization must be one of {_NORMALIZATIONS}, got {self.loss_normalization!r}")
        self._token_mean = TokenMean()
        self.token_metrics = nn.ModuleDict({f"{stage}_metrics": TokenMetrics(stage) for stage in _STAGES})

    def lm_loss(self, logits: LazyLogits | Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy of predicting each token from those before it.

        Args:
            logits: ``[batch_size, seq_len, vocab_size]``, as the model returns them.
            labels: ``[batch_size, seq_len]``, int64, unshifted; -100 is ignored.

        Returns:
            A scalar, NaN if every label is ignored.

        Raises:
            ValueError: If the shapes do not fit, or a label on the CPU is out of range.
        """
        return self.lm_loss_with_counts(logits, labels).loss

    def lm_loss_with_counts(self, logits: LazyLogits | Tensor, labels: Tensor) -> LMLoss:
        """:meth:`lm_loss` with the numbers of tokens and of correct predictions."""
        if labels.shape != logits.shape[:-1]:
            raise ValueError(
                f"labels must hold one label for each token of the logits: logits have {tuple(logits.shape[:-1])}"
                f" tokens, labels have shape {tuple(labels.shape)}"
            )
        # Shifting the labels instead of the logits costs nothing, and the last token is ignored, not cut.
        targets = F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)
        if isinstance(logits, LazyLogits):
            loss_sum, stats = logits.cross_entropy(targets, reduction="sum", return_stats=True)
            predictions = stats.predictions
        else:
            loss_sum = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")
            predictions = logits.detach().argmax(dim=-1)
        kept = targets != IGNORE_INDEX
        num_tokens = kept.sum()
        loss = (loss_sum / num_tokens.clamp(min=1)).masked_fill(num_tokens == 0, math.nan)
        return LMLoss(loss, loss_sum, num_tokens, ((predictions == targets) & kept).sum())

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        return self._lm_step("train", batch)

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        return self._lm_step("val", batch)

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        return self._lm_step("test", batch)

    def _lm_step(self, stage: str, batch: Mapping[str, Any]) -> Tensor:
        if not isinstance(batch, Mapping) or batch.get("labels") is None:
            found = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise ValueError(
                f"batch must be a mapping with the key 'labels' for the default {stage} step, got {found}; override"
                " the step for batches of another form"
            )
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        with lazy_logits():
            result = self.lm_loss_with_counts(self.model(**inputs).logits, batch["labels"])
        self._log_tokens(stage, result)
        if stage == "train" and self._normalizes_steps():
            return self._token_mean.add(result.loss_sum, result.num_tokens)
        return result.loss

    def _normalizes_steps(self) -> bool:
        """Whether gradients become those of the step's mean; not where engines keep them to themselves."""
        return (
            self.loss_normalization == "tokens"
            and self._trainer is not None
            and self.automatic_optimization
            and not self.trainer.strategy.handles_gradient_accumulation
        )

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self._token_mean.reset()

    def on_after_backward(self) -> None:
        super().on_after_backward()
        # Here and not in a hook of the optimizer's step, where callbacks, which may look at gradients, come first.
        if self._token_mean.is_empty or self.trainer.fit_loop.epoch_loop._should_accumulate():
            return
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        loss = self._token_mean.normalize(
            (parameter for group in groups for parameter in group["params"]),
            num_micro_batches=self.trainer.accumulate_grad_batches,
            num_ranks=self.trainer.world_size,
            sum_over_ranks=lambda tensor: self.trainer.strategy.reduce(tensor, reduce_op="sum"),
        )
        self._log_step(loss)

    def _log_step(self, loss: Tensor) -> None:
        self.log("train_loss_step", loss, prog_bar=True, on_step=True, on_epoch=False)

    def _log_tokens(self, stage: str, result: LMLoss) -> None:
        metrics = self.token_metrics[f"{stage}_metrics"]
        metrics.update_tokens(result.loss, result.num_correct, result.num_tokens)
        if stage == "train" and not self._normalizes_steps():
            self._log_step(result.loss.detach())
        for name, metric in metrics.items():
            self.log(name, metric, on_step=False, on_epoch=True, prog_bar=stage != "train" and not name.endswith("y"))
