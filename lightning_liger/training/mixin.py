"""Mixin for LightningModules that train a causal language model on the fused loss."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import IGNORE_INDEX, TokenScores
from liger_ops.arguments import check_bool, check_choice, check_tensor, wrong_type, wrong_value
from liger_ops.loss.options import check_labels
from lightning_liger.lazy.logits import LazyLogits, as_lazy, lazy_logits
from lightning_liger.lazy.scores import token_loss
from lightning_liger.lazy.traced import TracedLogits
from lightning_liger.losses.sft import SFTLoss, dft_loss
from lightning_liger.sequences.labels import shift_labels
from lightning_liger.training.batches import LABELS, check_batch
from lightning_liger.training.metrics import Perplexity, RunningMean, RunningMetric
from lightning_liger.training.steps import LigerStepMixin


class LMLoss(NamedTuple):
    """The loss of one batch, with the counts that metrics need."""

    loss: Tensor
    """Mean over the tokens that are not ignored, a differentiable scalar."""
    loss_sum: Tensor
    """Their sum, a differentiable scalar."""
    num_tokens: Tensor
    """Number of tokens that are not ignored."""
    num_correct: Tensor
    """Number of tokens whose label has the largest logit."""
    cross_entropy: Tensor | None = None
    """The mean cross entropy where the loss is another one, without gradient."""


class LigerLMMixin(LigerStepMixin):
    """Training, validation and test steps of a causal language model whose loss never materializes the logits.

    List it before the base class and put the model into ``self.model``::

        class LM(LigerLMMixin, L.LightningModule):
            def configure_model(self):
                if getattr(self, "model", None) is None:  # Lightning calls this for each stage
                    self.model = AutoModelForCausalLM.from_config(config)

    The steps expect batches with ``labels`` (unshifted, as Hugging Face's) or ``shift_labels`` (the target of each
    token) and pass everything else to the model, which has to know each key. A document starts wherever
    ``position_ids`` start again, and no token has to predict the first token of another document. Labels of
    encoder-decoders, masked language models and token classification are those of their own tokens. The steps log
    ``{train,val,test}_{loss,perplexity,mean_token_accuracy}``, averaged over tokens, of each data loader. Losses that
    the model itself adds to cross entropy, such as a router's, are part of the loss, weighted by tokens, and logged as
    ``{train,val,test}_aux_loss`` too. Override the steps as you like::

        def training_step(self, batch, batch_idx):
            labels = batch.pop("labels")
            return self.lm_loss(self.model(**batch).logits, labels)

    A step returns the mean over the target tokens of its batch. Gradients are those of the mean over the tokens of the
    whole optimizer step, however they were split over accumulated micro-batches and ranks: where the loss is
    differentiated, it is weighted by the batch's share of the tokens. A term that you add to it has the same weight,
    which is 1 with one micro-batch and one rank. With ``loss_normalization = "micro_batch"`` in the class, all
    micro-batches have equal weights, as with your own training step.

    With ``loss_type = "dft"`` in the class the loss of each token is its cross entropy times its probability, which has
    no gradient (dynamic fine-tuning, arXiv:2508.05629). Perplexity is still that of the cross entropy.

    The loss is fused when the model's head was patched, which the ``liger`` strategies, ``LigerCallback`` and
    :func:`~lightning_liger.apply_liger_kernels` do; otherwise the steps materialize the logits.

    Raises:
        TypeError: When a class lists the mixin after ``LightningModule``.
        ValueError: For an unknown ``loss_normalization`` or ``loss_type``; in the first step, for a model whose labels
            are not of tokens.
        RuntimeError: At the start of a stage for which ``configure_model`` replaced an existing model,
            unless the new one gets its weights from ``ckpt_path``. ``self.model = None`` before the stage is a fresh
            start.
    """

    loss_type: SFTLoss = "nll"
    _labels = ("next", "own")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_choice("loss_type", self.loss_type, get_args(SFTLoss))

    def lm_loss(
        self, logits: LazyLogits | Tensor, labels: Tensor, *, position_ids: Tensor | None = None, shifted: bool = False
    ) -> Tensor:
        """Mean loss of predicting each token from those before it: cross entropy, or that of ``loss_type``.

        Args:
            logits: ``[batch_size, seq_len, vocab_size]``, as the model returns them.
            labels: ``[batch_size, seq_len]``, int64; -100 is ignored.
            position_ids: ``[batch_size or 1, seq_len]``, for rows of several documents; see
                :func:`~lightning_liger.shift_labels`.
            shifted: Whether labels already are the targets of the tokens.

        Returns:
            A scalar, NaN if every label is ignored.

        Raises:
            TypeError: If ``logits`` are no floating-point tensor, ``labels`` no int64 one, or ``shifted`` no bool.
            ValueError: If shapes or devices do not fit, or a label on the CPU is out of range.
        """
        return self.lm_loss_with_counts(logits, labels, position_ids=position_ids, shifted=shifted).loss

    def lm_loss_with_counts(
        self, logits: LazyLogits | Tensor, labels: Tensor, *, position_ids: Tensor | None = None, shifted: bool = False
    ) -> LMLoss:
        """:meth:`lm_loss` with the numbers of tokens and of correct predictions."""
        logits = as_lazy(logits)
        if not isinstance(logits, LazyLogits) and not (isinstance(logits, Tensor) and logits.is_floating_point()):
            raise wrong_type("logits", "the model's logits, a floating-point tensor", logits)
        if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
            raise wrong_type("labels", "a tensor of class indices, of dtype torch.int64", labels)
        check_tensor("position_ids", position_ids, optional=True)
        check_bool("shifted", shifted)
        if labels.shape != logits.shape[:-1]:
            raise ValueError(
                f"labels must hold one label for each token of the logits: logits have {tuple(logits.shape[:-1])}"
                f" tokens, labels have shape {tuple(labels.shape)}"
            )
        if not labels.ndim:
            raise wrong_value("labels", "a tensor of shape [batch_size, seq_len]", labels)
        if labels.device != logits.device:
            raise wrong_value("labels", f"on the device of the logits, {logits.device}", labels)
        # Shifting the labels instead of the logits costs nothing, and the last token is ignored, not cut.
        targets = labels if shifted else shift_labels(labels, position_ids)
        cross_entropy = None
        if self.loss_type == "dft":
            loss_sum, scores = token_loss(logits, targets, _dft_loss, outputs=("log_probs", "predictions"))
            predictions, cross_entropy = scores.predictions, -cast(Tensor, scores.log_probs).sum()
        elif isinstance(logits, LazyLogits | TracedLogits):
            loss_sum, stats = logits.cross_entropy(targets, reduction="sum", return_stats=True)
            predictions = stats.predictions
        else:
            check_labels("labels", targets, logits.shape[-1], IGNORE_INDEX)
            loss_sum = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")
            predictions = logits.detach().argmax(dim=-1)
        kept = targets != IGNORE_INDEX
        num_tokens = kept.sum()
        loss = (loss_sum / num_tokens.clamp(min=1)).masked_fill(num_tokens == 0, math.nan)
        if cross_entropy is not None:
            cross_entropy = cross_entropy / num_tokens.clamp(min=1)
        return LMLoss(loss, loss_sum, num_tokens, ((predictions == targets) & kept).sum(), cross_entropy)

    def _step(self, stage: str, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, int | None]:
        model = self._seen_model()
        check_batch(stage, batch, model)
        is_compared = batch.get("labels") is not None and batch.get("position_ids") is None
        if model.labels == "own" and batch.get("labels") is not None:  # they are the targets of their tokens
            batch = {("shift_labels" if key == "labels" else key): value for key, value in batch.items()}
        batch = self._context_parallel_shard(stage, batch)
        inputs = {key: value for key, value in batch.items() if key not in LABELS}
        position_ids, shifted = batch.get("position_ids"), batch.get("shift_labels") is not None
        if position_ids is not None and position_ids.ndim > 2:  # of images and text: a restart is not a new document
            position_ids = None
        labels = batch["shift_labels" if shifted else "labels"]
        with lazy_logits():
            output, auxiliary_loss, own_loss = model(inputs, labels)
            result = self.lm_loss_with_counts(output.logits, labels, position_ids=position_ids, shifted=shifted)
        if own_loss is not None and is_compared:
            model.compare(own_loss, result.loss if result.cross_entropy is None else result.cross_entropy)
        self._log_tokens(stage, result, auxiliary_loss)
        loss = result.loss
        if stage == "train" and self._normalizes_steps():  # no tokens are no NaN among those of other micro-batches
            loss = result.loss_sum / result.num_tokens.clamp(min=1)
        if auxiliary_loss is not None:
            loss = loss + auxiliary_loss
        return loss, result.num_tokens, None

    def _make_metrics(self) -> dict[str, RunningMetric]:
        names = ("loss", "perplexity", "mean_token_accuracy", "aux_loss")
        return {name: Perplexity() if name == "perplexity" else RunningMean() for name in names}

    @torch.compiler.disable  # Lightning inspects the signatures of hooks, which the compiler cannot
    def _log_tokens(self, stage: str, result: LMLoss, auxiliary_loss: Tensor | None) -> None:
        metrics, _ = self._stage_metrics(stage)
        number = result.num_tokens
        # Without tokens a mean is 0 / 0; it must not reach the sums.
        loss = torch.where(number > 0, result.loss.detach(), 0.0).double()
        cross_entropy = loss if result.cross_entropy is None else result.cross_entropy.double()
        means = {"loss": loss, "perplexity": cross_entropy}
        if auxiliary_loss is not None:
            means["aux_loss"] = auxiliary_loss.detach().double()
            means["loss"] = loss + means["aux_loss"]
        for name, mean in means.items():
            metrics[name].update(mean * number, number)
        metrics["mean_token_accuracy"].update(result.num_correct, number)
        self._log_metrics(stage, [*means, "mean_token_accuracy"])


def _dft_loss(scores: TokenScores, index: Tensor) -> Tensor:
    return dft_loss(cast(Tensor, scores.log_probs))
