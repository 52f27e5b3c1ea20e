"""Training of Medusa heads: alone on a frozen model (Medusa-1), or together with it (Medusa-2).

arXiv:2401.10774, section 2.2. See :mod:`lightning_liger.losses.multi_head` for the loss.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from liger_ops import TokenScores
from liger_ops.arguments import check_number, check_path, wrong_type, wrong_value
from lightning_liger.lazy.distributed import DistributedLazyLogits
from lightning_liger.lazy.logits import LazyLogits, as_lazy, lazy_logits
from lightning_liger.lazy.scores import divergence, token_loss
from lightning_liger.losses.multi_head import Schedule, medusa_weights, scheduled_coefficient, targets_ahead
from lightning_liger.losses.options import Count, Limits, NonNegative, Positive
from lightning_liger.post_training.base import StepLoss, Term
from lightning_liger.post_training.causal_lm import LossCausalLM, takes
from lightning_liger.post_training.medusa_heads import MedusaHeads, check_sizes, find_heads, head_of, load_medusa_heads
from lightning_liger.post_training.metrics import Mean
from lightning_liger.post_training.reference import evaluating, has_adapters, without_adapters
from lightning_liger.post_training.rows import Rows, read_tokens
from lightning_liger.post_training.teacher import LigerTeacherMixin, build_frozen


class LigerMedusaMixin(LigerTeacherMixin):
    """Training, validation and test steps of Medusa heads, whose losses never materialize logits.

    List it before the base class, and put the model and its heads into ``self.model`` and ``self.medusa_heads``::

        class Medusa(LigerMedusaMixin, L.LightningModule):
            def configure_model(self):
                if getattr(self, "model", None) is None:  # Lightning calls this for each stage
                    self.model = AutoModelForCausalLM.from_pretrained(folder)
                    self.medusa_heads = MedusaHeads.of(self.model, num_heads=5)

    Batches are those of ``LigerLMMixin``. Head k (from 0) predicts the token k + 2 after each token of ``input_ids``.
    With ``medusa_only_heads`` the loss is ``sum_k decay ** (k + 1) CE_k`` and the model is frozen: it runs in
    evaluation mode without gradients. Without, it is ``CE + coefficient * sum_k decay ** (k + 1) CE_k``; with
    ``medusa_self_distillation``, the forward KL divergence from the original model replaces CE. All sums are
    divided by the number of target tokens of the whole optimizer step. The residual blocks are part of the graph, and
    each head's loss is computed from its hidden states, one head after the other.

    The final hidden states are those of the model's lazy logits, so its head has to be patched, by a ``liger``
    strategy, ``LigerCallback`` or :func:`~lightning_liger.apply_liger_kernels`.

    Each stage logs ``loss``, ``medusa{k}_loss`` and ``medusa{k}_accuracy`` and, for joint training, ``lm_loss`` and
    ``lm_accuracy`` (or ``lm_divergence``), each over the tokens that have the target.

    Attributes:
        medusa_only_heads: Whether the model is frozen.
        medusa_decay_coefficient: Head k has the weight ``decay ** (k + 1)``.
        medusa_heads_coefficient: The weight of all heads together in joint training, after the schedule.
        medusa_scheduler: How that weight rises from 0: ``"constant"`` (not at all), ``"linear"`` or ``"sine"``.
        medusa_scheduler_steps: In how many optimizer steps; None for all that the Trainer expects.
        medusa_self_distillation: Whether joint training keeps the model close to the original one: the model without
            its adapters, or what :meth:`configure_original_model` returns.
    """

    medusa_heads: MedusaHeads
    _items = "tokens"
    medusa_only_heads: bool = True
    medusa_decay_coefficient: Positive = 0.8
    medusa_heads_coefficient: NonNegative = 0.2
    medusa_scheduler: Schedule = "constant"
    medusa_scheduler_steps: Count | None = None
    medusa_self_distillation: bool = False
    _teacher_hook = "configure_original_model"

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if self.medusa_only_heads and self.medusa_self_distillation:
            raise wrong_value("medusa_self_distillation", "False with medusa_only_heads=True, a frozen model", True)

    def configure_original_model(self) -> nn.Module | None:
        """Returns a copy of the model before training, for self-distillation. Called once, when a stage begins.

        Not called for a model with adapters, which is the original one without them.
        """
        return None

    def _prepare_teacher(self) -> None:
        if self.medusa_self_distillation and not has_adapters(self.model):
            super()._prepare_teacher()

    def train(self, mode: bool = True) -> Self:
        """As of any module; a frozen model stays in evaluation mode."""
        super().train(mode)
        if self.medusa_only_heads and getattr(self, "model", None) is not None:
            self.model.eval()
        return self

    def metric_kinds(self) -> dict[str, str]:
        heads = [f"medusa{k}" for k in range(len(self.medusa_heads))]
        if not self.medusa_only_heads and not self.medusa_self_distillation:
            heads.append("lm")
        names = [f"{head}_{quantity}" for head in heads for quantity in ("loss", "accuracy")]
        return dict.fromkeys([*names, "lm_divergence"] if self.medusa_self_distillation else names, "mean")

    @torch.compiler.disable  # the hidden states are those of lazy logits, which compiled code does not have
    def step_loss(self, stage: str, batch: Mapping[str, Any]) -> StepLoss:
        model = self._seen_model()
        rows = read_tokens(stage, batch, model)
        positions, num_heads = rows.positions, len(self.medusa_heads)
        ahead = {f"ahead{k}": targets_ahead(rows.labels, k + 1, positions) for k in range(num_heads)}
        rows = rows._replace(extras=ahead).to_context(self.context)
        targets = [rows.extras[name] for name in ahead]
        if self.medusa_only_heads:
            self.model.eval()
        with lazy_logits():
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.medusa_only_heads):
                output, auxiliary, _ = model(rows.inputs, rows.labels)
            logits = _checked(as_lazy(output.logits), with_gradient=not self.medusa_only_heads)
            weights = medusa_weights(num_heads, self.medusa_decay_coefficient)
            total, measured = self._heads_loss(logits, targets, weights)
            if not self.medusa_only_heads:
                own, quantities = self._model_loss(logits, rows)
                total, measured = own + self._coefficient() * total, measured | quantities
        term = Term(total, rows.num_labels, "tokens", is_whole=False)
        return StepLoss((term,), measured, None if self.medusa_only_heads else auxiliary)

    def _model_loss(self, logits: LazyLogits, rows: Rows) -> tuple[Tensor, dict[str, Mean]]:
        """The sum of the model's own losses of the next token, and what is measured on them."""
        if not self.medusa_self_distillation:
            return _cross_entropy("lm", logits, rows.labels)
        original = self._original_logits(rows)
        loss = divergence(logits, original, kind="forward_kl", mask=rows.labels >= 0, reduction="sum")
        return loss, {"lm_divergence": Mean(loss.detach(), rows.num_labels)}

    @torch.no_grad()
    def _original_logits(self, rows: Rows) -> Tensor:
        if has_adapters(self.model):
            with without_adapters(self.model), evaluating(self.model):
                return self.call_model(rows.inputs, rows.labels)[0]
        self._prepare_teacher()
        if self.teacher is None:
            raise wrong_type("configure_original_model()", "a module, for a model without adapters", None)
        return self.call_model(rows.inputs, rows.labels, self.teacher)[0]

    def _heads_loss(
        self, logits: LazyLogits, targets: list[Tensor], weights: list[float]
    ) -> tuple[Tensor, dict[str, Mean]]:
        """The weighted sum of all heads' losses, and what is measured on them."""
        outputs, measured = self.medusa_heads(logits.tokens[..., : logits.head.weight.shape[1]]), dict[str, Mean]()
        if self.medusa_heads.is_shared:  # all rows through the head at once, for one gradient of its weight
            stacked = _as_transformed(head_of(self.model)(torch.stack(outputs)), logits)
            total, scores = multi_token_loss(stacked, torch.stack(targets), weights)
            pair = cast(Tensor, scores.log_probs), cast(Tensor, scores.correct)
            for k, (log_probs, correct) in enumerate(zip(*pair, strict=True)):
                measured |= _measured(f"medusa{k}", -log_probs.sum(), correct, targets[k])
            return total, measured
        losses = []
        for k, (output, labels) in enumerate(zip(outputs, targets, strict=True)):
            loss, quantities = _cross_entropy(f"medusa{k}", _as_transformed(output, logits), labels)
            losses.append(weights[k] * loss)
            measured |= quantities
        return torch.stack(losses).sum(), measured

    def _coefficient(self) -> float:
        # Only training has steps: without them the weight is the one after the schedule.
        if self.medusa_scheduler == "constant" or self._attached_trainer is None or self.trainer.state.fn != "fit":
            return self.medusa_heads_coefficient
        num_steps: float = self.medusa_scheduler_steps or self.trainer.estimated_stepping_batches
        if not 1 <= num_steps < math.inf:  # Lightning's words for unknown
            raise ValueError(
                "medusa_scheduler_steps must be an integer where the number of training steps is unknown, got None"
            )
        return scheduled_coefficient(
            self.trainer.global_step, int(num_steps), self.medusa_heads_coefficient, self.medusa_scheduler
        )


def _checked(logits: Tensor, with_gradient: bool) -> LazyLogits:
    if not isinstance(logits, LazyLogits):
        raise RuntimeError(
            "Medusa heads need the final hidden states, which the lazy logits of a patched LM head have, but the model"
            " returned real logits: use a liger strategy, LigerCallback or apply_liger_kernels, with"
            " 'linear_cross_entropy' among the kernels"
        )
    if isinstance(logits, DistributedLazyLogits) and logits.head.shard is not None and with_gradient:
        raise RuntimeError(
            "medusa_only_heads must be True with tensor_parallel_size above 1, got False: the gradients of whole heads"
            " do not fit hidden states whose gradients are summed over ranks"
        )
    return logits


def _as_transformed(logits: Tensor, like: LazyLogits) -> LazyLogits:
    """The logits of a further head after the operations (scale, soft-cap, casts) that the model does on its own."""
    if not isinstance(logits, LazyLogits):
        raise RuntimeError(
            "the projections of Medusa heads returned real logits: set self.medusa_heads in configure_model, before"
            " kernels are applied"
        )
    return logits if logits.transform == like.transform else logits.same(transform=like.transform)


def _cross_entropy(name: str, logits: LazyLogits, targets: Tensor) -> tuple[Tensor, dict[str, Mean]]:
    """The sum of the losses of one head, and what is measured on them."""
    loss, stats = logits.cross_entropy(targets, reduction="sum", return_stats=True)
    return loss, _measured(name, loss, (stats.predictions == targets) & (targets >= 0), targets)


def _measured(name: str, loss: Tensor, correct: Tensor, targets: Tensor) -> dict[str, Mean]:
    count = (targets >= 0).sum()
    return {f"{name}_loss": Mean(loss.detach(), count), f"{name}_accuracy": Mean(correct.sum(), count)}


def multi_token_loss(logits: Tensor, targets: Tensor, weights: Sequence[float]) -> tuple[Tensor, TokenScores]:
    """The weighted sum of cross entropies of several predictions that share the unembedding.

    For multi-token prediction (arXiv:2404.19737, arXiv:2412.19437), call the model's patched head once, with the hidden
    states of all predictions stacked::

        logits = model.get_output_embeddings()(torch.stack(hidden_states))  # lazy, [num_heads, batch_size, seq_len, V]
        targets = torch.stack([targets_ahead(shift_labels(labels), k) for k in range(num_heads)])
        loss, scores = multi_token_loss(logits, targets, deepseek_mtp_weights(num_heads))

    A step costs three products of the head's size for each prediction, and the gradient of its weight is summed once.

    Args:
        logits: ``[num_heads, ..., vocab_size]``, lazy or materialized.
        targets: ``[num_heads, ...]``, int64; -100 is ignored.
        weights: Of each prediction.

    Returns:
        The sum over all tokens, a differentiable scalar, to be divided by a number of tokens; and the scores
        ``log_probs`` and ``correct`` of all tokens, which have no gradient.

    Raises:
        TypeError: For arguments of a wrong type.
        ValueError: For shapes and numbers that do not fit.
    """
    if not isinstance(targets, Tensor):
        raise wrong_type("targets", "a tensor of shape [num_heads, ...]", targets)
    if not targets.ndim or not len(targets):
        raise wrong_value("targets", "a tensor of shape [num_heads, ...] with at least one prediction", targets)
    if not isinstance(weights, Sequence) or isinstance(weights, str):
        raise wrong_type("weights", "a list of numbers", weights)
    if len(weights) != len(targets):
        raise wrong_value("weights", f"as many numbers as targets {tuple(targets.shape)} have predictions", weights)
    for index, weight in enumerate(weights):
        check_number(f"weights[{index}]", weight, at_least=0)
    num_tokens = targets[0].numel()
    factors = torch.tensor(weights, dtype=torch.float64, device=targets.device)

    def weighted(scores: TokenScores, index: Tensor) -> Tensor:
        log_probs = cast(Tensor, scores.log_probs)
        return -factors.to(log_probs.dtype)[index // num_tokens] * log_probs

    return token_loss(logits, targets, weighted, outputs=("log_probs", "correct"))


@takes()
class LigerMedusa(LigerMedusaMixin, LossCausalLM):
    """A causal language model with Medusa heads, which start as copies of the LM head.

    Arguments are the attributes here and of :class:`LigerMedusaMixin`, and those of
    :class:`~lightning_liger.LigerCausalLM`, of which ``lora`` is for joint training.

    Attributes:
        medusa_num_heads: How many tokens after the next one are predicted.
        medusa_num_layers: Residual blocks of each head.
        medusa_shared_head: Whether the heads use the model's LM head and consist of residual blocks only.
        medusa_lr_multiplier: Factor of the learning rate for the heads.
        medusa_warmup_steps: Steps in which the heads' learning rate rises to its peak; None for ``warmup_steps``.
        medusa_pretrained: Heads to start from, a folder or a name on the Hub with ``medusa_lm_head.safetensors``; see
            :func:`~lightning_liger.save_medusa_heads`. Not for models on the meta device.
        medusa_self_distillation: As for the mixin; without adapters, the original model is a second copy of
            ``pretrained`` on each device.

    Raises:
        FileNotFoundError: As :class:`~lightning_liger.LigerCausalLM`, and if ``medusa_pretrained`` has no heads.
        TypeError, ValueError: As :class:`~lightning_liger.LigerCausalLM`.
    """

    medusa_num_heads: Count = 5
    medusa_num_layers: Annotated[int, Limits(at_least=0)] = 1
    medusa_shared_head: bool = False
    medusa_lr_multiplier: NonNegative = 1.0
    medusa_warmup_steps: Annotated[int, Limits(at_least=0)] | None = None
    medusa_pretrained: str | None = None

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_sizes(self.medusa_num_heads, self.medusa_num_layers, is_shared=self.medusa_shared_head)
        settings = self._settings
        if settings.lora is not None and self.medusa_only_heads:
            raise wrong_value("lora", "None with medusa_only_heads=True, a frozen model", settings.lora)
        if self.medusa_self_distillation and settings.lora is None and settings.pretrained is None:
            raise wrong_value("pretrained", "a folder, from which medusa_self_distillation makes a copy", None)
        if self.medusa_pretrained is not None:
            check_path("medusa_pretrained", self.medusa_pretrained)
            find_heads(self.medusa_pretrained)

    def _configure_other_models(self) -> None:
        super()._configure_other_models()
        self.medusa_heads = MedusaHeads.of(
            self.model, self.medusa_num_heads, self.medusa_num_layers, shared_head=self.medusa_shared_head
        )
        if self.medusa_pretrained is not None:
            load_medusa_heads(self.medusa_heads, self.medusa_pretrained)
        if self.medusa_only_heads:
            self.model.requires_grad_(False)

    def configure_original_model(self) -> nn.Module:
        dtype = next(self.model.parameters()).dtype
        return cast(nn.Module, build_frozen(self.config, self._folder, self.device, dtype))

    def _learning_rate_scale(self, module: nn.Module) -> float:
        return super()._learning_rate_scale(module) * (self.medusa_lr_multiplier if self._is_head(module) else 1.0)

    def _warmup_steps(self, module: nn.Module) -> int:
        steps = self.medusa_warmup_steps if self._is_head(module) else None
        return super()._warmup_steps(module) if steps is None else steps

    def _is_head(self, module: nn.Module) -> bool:
        return any(module is part for part in self.medusa_heads.modules())
