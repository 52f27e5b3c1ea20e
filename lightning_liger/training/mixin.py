"""What turns a LightningModule with a language model into one that trains on its fused loss."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from liger_ops import IGNORE_INDEX
from lightning_liger.lazy.logits import LazyLogits, lazy_logits
from lightning_liger.sequences.context_parallel import attention_implementation
from lightning_liger.sequences.labels import shift_labels
from lightning_liger.training.metrics import TokenMetrics
from lightning_liger.training.token_mean import TokenMean

_LABELS = ("labels", "shift_labels")
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

    The steps expect batches with ``labels`` (unshifted, as Hugging Face's) or ``shift_labels`` (what each token is to
    predict) and pass everything else to the model. Where ``position_ids`` start again, so does a document, and no token
    is to predict the first of another one. The steps log ``{train,val,test}_{loss,perplexity,accuracy}``, averaged over
    tokens. Override them as you like::

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

    def lm_loss(
        self,
        logits: LazyLogits | Tensor,
        labels: Tensor,
        *,
        position_ids: Tensor | None = None,
        shifted: bool = False,
    ) -> Tensor:
        """Mean cross entropy of predicting each token from those before it.

        Args:
            logits: ``[batch_size, seq_len, vocab_size]``, as the model returns them.
            labels: ``[batch_size, seq_len]``, int64; -100 is ignored.
            position_ids: ``[batch_size or 1, seq_len]``, for rows of several documents; see
                :func:`~lightning_liger.shift_labels`.
            shifted: Whether labels already are what each token is to predict.

        Returns:
            A scalar, NaN if every label is ignored.

        Raises:
            ValueError: If the shapes do not fit, or a label on the CPU is out of range.
        """
        return self.lm_loss_with_counts(logits, labels, position_ids=position_ids, shifted=shifted).loss

    def lm_loss_with_counts(
        self,
        logits: LazyLogits | Tensor,
        labels: Tensor,
        *,
        position_ids: Tensor | None = None,
        shifted: bool = False,
    ) -> LMLoss:
        """:meth:`lm_loss` with the numbers of tokens and of correct predictions."""
        if labels.shape != logits.shape[:-1]:
            raise ValueError(
                f"labels must hold one label for each token of the logits: logits have {tuple(logits.shape[:-1])}"
                f" tokens, labels have shape {tuple(labels.shape)}"
            )
        # Shifting the labels instead of the logits costs nothing, and the last token is ignored, not cut.
        targets = labels if shifted else shift_labels(labels, position_ids)
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
        _check_batch(stage, batch)
        _check_packing(self.model, batch.get("position_ids"))
        batch = self._own_piece(stage, batch)
        inputs = {key: value for key, value in batch.items() if key not in _LABELS}
        position_ids, shifted = batch.get("position_ids"), batch.get("shift_labels") is not None
        if position_ids is not None and position_ids.ndim > 2:  # of images and text, where they start again at will
            position_ids = None
        if position_ids is not None and getattr(getattr(self.model, "config", None), "use_cache", False):
            inputs.setdefault("use_cache", False)  # transformers looks for documents only where it keeps no cache
        with lazy_logits():
            logits = self.model(**inputs).logits
            labels = batch["shift_labels" if shifted else "labels"]
            result = self.lm_loss_with_counts(logits, labels, position_ids=position_ids, shifted=shifted)
        self._log_tokens(stage, result)
        if stage == "train" and self._normalizes_steps():
            return self._token_mean.add(result.loss_sum, result.num_tokens)
        return result.loss

    def _own_piece(self, stage: str, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's part of the rows, where ranks share them."""
        context = None if self._trainer is None else getattr(self.trainer.strategy, "context_parallel", None)
        if context is None:
            return batch
        if stage == "train" and not self._normalizes_steps():
            raise ValueError(
                "context_parallel_size needs loss_normalization='tokens' and automatic optimization: ranks hold pieces"
                f" with different numbers of labels, got loss_normalization={self.loss_normalization!r} and"
                f" automatic_optimization={self.automatic_optimization}"
            )
        return context.split(batch)

    def _normalizes_steps(self) -> bool:
        """Whether gradients become those of the step's mean; not where engines keep them to themselves."""
        if self.loss_normalization != "tokens" or self._trainer is None or not self.automatic_optimization:
            return False
        strategy = self.trainer.strategy
        return not strategy.handles_gradient_accumulation or getattr(strategy, "scales_gradients", False)

    def rank_state_dict(self) -> dict[str, Any]:
        """What a rank needs for itself to go on in the middle of an epoch: its part of the averages over the epoch."""
        return {"train_metrics": self.token_metrics["train_metrics"].sums()}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`rank_state_dict` returned."""
        self.token_metrics["train_metrics"].load_sums(state["train_metrics"])

    def on_train_start(self) -> None:
        super().on_train_start()
        self._token_mean.reset()
        if self.loss_normalization == "tokens" and self.automatic_optimization and not self._normalizes_steps():
            rank_zero_warn(
                f"{type(self.trainer.strategy).__name__} keeps gradients to itself: the training loss is the mean of"
                " the means of micro-batches and ranks, whatever their numbers of tokens. 'liger_deepspeed_stage_2' and"
                " '_3' take the mean over tokens; loss_normalization = 'micro_batch' says that you do not want it."
            )

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        # An engine that accumulates by itself finishes the last step of an epoch in the next one.
        if not self.trainer.strategy.handles_gradient_accumulation:
            self._token_mean.reset()

    def on_after_backward(self) -> None:
        super().on_after_backward()
        # Here and not in a hook of the optimizer's step, where callbacks, which may look at gradients, come first.
        if self._token_mean.is_empty or self._should_accumulate():
            return
        strategy = self.trainer.strategy
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        loss = self._token_mean.normalize(
            (parameter for group in groups for parameter in group["params"]),
            num_micro_batches=self.trainer.accumulate_grad_batches,
            num_ranks=self.trainer.world_size,
            sum_over_ranks=lambda tensor: strategy.reduce(tensor, reduce_op="sum"),
            scale=strategy.scale_gradients if strategy.handles_gradient_accumulation else None,
        )
        self._log_step(loss)

    def _should_accumulate(self) -> bool:
        strategy = self.trainer.strategy
        if strategy.handles_gradient_accumulation:
            return strategy.should_accumulate()
        return self.trainer.fit_loop.epoch_loop._should_accumulate()

    def _log_step(self, loss: Tensor) -> None:
        self.log("train_loss_step", loss, prog_bar=True, on_step=True, on_epoch=False)

    @torch.compiler.disable  # Lightning looks at signatures of hooks, which the compiler cannot
    def _log_tokens(self, stage: str, result: LMLoss) -> None:
        metrics = self.token_metrics[f"{stage}_metrics"]
        metrics.update_tokens(result.loss, result.num_correct, result.num_tokens)
        if stage == "train" and not self._normalizes_steps():
            self._log_step(result.loss.detach())
        for name, metric in metrics.items():
            self.log(name, metric, on_step=False, on_epoch=True, prog_bar=stage != "train" and not name.endswith("y"))


def _check_batch(stage: str, batch: Any) -> None:
    """Raises ValueError unless ``batch`` is a mapping with labels of one kind."""
    keys = [key for key in _LABELS if isinstance(batch, Mapping) and batch.get(key) is not None]
    if len(keys) != 1:
        found = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            "batch must be a mapping with one of the keys 'shift_labels' and 'labels' for the default"
            f" {stage} step, got {found}; override the step for batches of another form"
        )


def _check_packing(model: nn.Module, position_ids: Tensor | None) -> None:
    """Raises ValueError for documents that attention would take for one."""
    if position_ids is None or position_ids.ndim != 2 or len(position_ids) == 1:
        return
    implementation = attention_implementation(model)
    if "flash" not in implementation:
        return
    if bool((position_ids.diff(dim=-1) != 1).any()):  # waits for the device, as flash attention's own look at them
        raise ValueError(
            f"attn_implementation={implementation!r} tells documents apart only in a batch of one row, got position_ids"
            f" of shape {tuple(position_ids.shape)} that start again: put the rows end to end into one, or use 'sdpa'"
        )
