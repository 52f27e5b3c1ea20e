"""What turns a LightningModule with a language model into one that trains on its fused loss."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn

from liger_ops import IGNORE_INDEX
from lightning_liger.lazy_logits import LazyLogits, lazy_logits
from lightning_liger.metrics import TokenMetrics

_STAGES = ("train", "val", "test")


class LMLoss(NamedTuple):
    """The loss of one batch and what the metrics need of it."""

    loss: Tensor
    """Mean over the tokens that are not ignored, a differentiable scalar."""
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

    The loss is fused when the model's head was patched, which the ``liger`` strategies, ``LigerCallback`` and
    :func:`~lightning_liger.apply_liger_kernels` do; otherwise the steps work on whole logits.

    Raises:
        TypeError: When a class lists the mixin behind ``LightningModule``.
    """

    model: nn.Module

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
            loss, stats = logits.cross_entropy(targets, return_stats=True)
            predictions = stats.predictions
        else:
            loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
            predictions = logits.detach().argmax(dim=-1)
        kept = targets != IGNORE_INDEX
        return LMLoss(loss, kept.sum(), ((predictions == targets) & kept).sum())

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
        return result.loss

    def _log_tokens(self, stage: str, result: LMLoss) -> None:
        metrics = self.token_metrics[f"{stage}_metrics"]
        metrics.update_tokens(result.loss, result.num_correct, result.num_tokens)
        if stage == "train":
            self.log("train_loss_step", result.loss.detach(), prog_bar=True, on_step=True, on_epoch=False)
        for name, metric in metrics.items():
            self.log(name, metric, on_step=False, on_epoch=True, prog_bar=stage != "train" and not name.endswith("y"))
