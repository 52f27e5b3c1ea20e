"""Knowledge distillation from a frozen teacher, its stored top-k, or its log-probabilities of sampled tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from liger_ops import TokenScores
from liger_ops.arguments import check_path, check_shape, check_tensor, wrong_type, wrong_value
from liger_ops.divergence.options import num_common_columns
from liger_ops.loss.chunked_loss import choose_chunk_size
from lightning_liger.hub import check_for_repository, checkpoint_folder, download_weights
from lightning_liger.lazy.chunks import over_chunks
from lightning_liger.lazy.scores import divergence, logit_rows, token_loss, token_scores, topk_log_probs
from lightning_liger.losses.distillation import (
    first_occurrences,
    sampled_divergence,
    sparse_divergence,
    universal_logit_divergence,
)
from lightning_liger.losses.distillation_options import DistillationOptions
from lightning_liger.losses.options import Options
from lightning_liger.post_training.base import StepLoss, Term
from lightning_liger.post_training.causal_lm import LossCausalLM, takes
from lightning_liger.post_training.metrics import Mean, Measured
from lightning_liger.post_training.rows import Rows, read_tokens
from lightning_liger.post_training.teacher import LigerTeacherMixin, build_frozen
from lightning_liger.training.architecture import build_config

TOPK_IDS, TOPK_LOG_PROBS = "teacher_topk_ids", "teacher_topk_log_probs"
TEACHER_LOG_PROBS, OLD_LOG_PROBS = "teacher_per_token_logps", "old_per_token_logps"
_COLUMNS = (TOPK_IDS, TOPK_LOG_PROBS, TEACHER_LOG_PROBS, OLD_LOG_PROBS)
_UNUSED = ("advantages", "rewards", "group_ids", "ref_per_token_logps", "sampling_per_token_logps")  # of rollouts
_CHUNK_BYTES, _BYTES_PER_LOGIT = 2**29, 16  # of the probabilities, their sorted copy and their order


class LigerDistillationMixin(LigerTeacherMixin):
    """Training, validation and test steps of a student, whose losses never materialize logits.

    List it before the base class, put the student into ``self.model``, and return the teacher from
    :meth:`configure_teacher`, unless batches contain its outputs::

        class Student(LigerDistillationMixin, L.LightningModule):
            distillation = DistillationOptions(divergence="reverse_kl")

            def configure_model(self):
                if getattr(self, "model", None) is None:  # Lightning calls this for each stage
                    self.model = AutoModelForCausalLM.from_pretrained(student)

            def configure_teacher(self):
                return AutoModelForCausalLM.from_pretrained(teacher)

    Batches are those of ``LigerLMMixin``, or have ``completion_mask`` instead of ``labels``. Tokens without a label do
    not count. Further keys, each used by the mode that needs it:

    - ``teacher_topk_ids`` (int64) and ``teacher_topk_log_probs``, ``[batch_size, seq_len, K]``: as logits, those at a
      token are about the next one; -inf where there are fewer than K. ``"topk_logits"`` then needs no teacher.
    - ``teacher_per_token_logps``, ``[batch_size, seq_len]``: each at its token. ``"sampled_token"`` then needs no
      teacher.
    - ``old_per_token_logps``, ``[batch_size, seq_len]``: of the policy that sampled the tokens.
    - ``teacher_input_ids``, ``teacher_labels`` and others with that prefix: for ``"uld"``, which needs them, the same
      text in the teacher's tokens. The i-th labeled token of a row is compared with the i-th of the other.

    The loss is the mean over the labeled tokens of the whole optimizer step, regardless of micro-batches and ranks.
    The teacher is frozen, in evaluation mode, on each rank whole or sharded over all of them, whichever engine trains
    the student; it is in no checkpoint and no optimizer.

    Each stage logs ``loss``, ``distillation_loss``, ``num_tokens`` and, where they exist, ``cross_entropy``,
    ``entropy``, ``mean_token_accuracy``, ``student_mass`` and ``teacher_mass`` (of the K ids), ``log_ratio``,
    ``importance_weight``.

    Attributes:
        distillation: See :class:`DistillationOptions`.
        shard_teacher: Whether all ranks share the teacher's parameters.
    """

    distillation: DistillationOptions = DistillationOptions()
    _items = "tokens"
    shard_teacher: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hidden_metrics.add("importance_weight")  # until data have old_per_token_logps

    def configure_teacher(self) -> nn.Module | None:
        """Returns the teacher, None if batches have all that is needed. Called once, when a stage begins."""
        return None

    def metric_kinds(self) -> dict[str, str]:
        options, names = self.distillation, ["distillation_loss"]
        if options.crossentropy_weight:
            names += ["cross_entropy"]
        if options.distillation_mode == "sampled_token" or options.crossentropy_weight or options.log_entropy:
            names += ["entropy", "mean_token_accuracy"]
        if options.distillation_mode == "topk_logits":
            names += ["teacher_mass", *(["student_mass"] if options.support_mode != "renormalize" else [])]
        if options.distillation_mode == "sampled_token":
            names += ["log_ratio", "importance_weight"]
        return dict.fromkeys(names, "mean") | {"num_tokens": "sum"}

    def step_loss(self, stage: str, batch: Mapping[str, Any]) -> StepLoss:
        options = self.distillation
        rows = read_tokens(stage, batch, self._seen_model(), (*_COLUMNS, *_UNUSED), ("teacher_",))
        if ("teacher_input_ids" in rows.extras) != (options.distillation_mode == "uld"):
            raise ValueError(
                "batch must have 'teacher_input_ids' and 'teacher_labels' (data.teacher_tokenizer) for"
                f" distillation_mode='uld' only, got {sorted(map(str, batch))} for {options.distillation_mode!r}"
            )
        _check_columns(rows)
        num_tokens, rows = rows.num_tokens, rows.to_context(self.context)
        logits, auxiliary = self.call_model(rows.inputs, rows.labels)
        losses = {"full_logits": self._full_loss, "topk_logits": self._topk_loss, "sampled_token": self._sampled_loss}
        loss, count, measured = losses.get(options.distillation_mode, self._uld_loss)(logits, rows)
        measured["distillation_loss"] = Mean(loss.detach(), count)
        measured["num_tokens"] = num_tokens / self._ranks_per_batch
        total, outputs = options.distillation_weight * loss, ("log_probs", "entropy", "correct")
        if options.crossentropy_weight:
            cross_entropy, scores = token_loss(
                logits, rows.labels, lambda scores, _: -cast(Tensor, scores.log_probs), outputs=outputs,
                detach=("entropy",),
            )  # fmt: skip
            total = total + options.crossentropy_weight * cross_entropy
            measured = _label_metrics(scores, rows, cross_entropy=cross_entropy) | measured
        elif options.log_entropy and "entropy" not in measured:
            with torch.no_grad():
                measured |= _label_metrics(token_scores(logits.detach(), rows.labels, outputs=outputs[1:]), rows)
        return StepLoss((Term(total, count, "tokens", is_whole=False),), measured, auxiliary)

    # One loss each: the sum over tokens, their number, and what is measured

    def _full_loss(self, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor, dict[str, Measured]]:
        options = self.distillation
        loss = divergence(
            logits, self._teacher_logits(rows), kind=options.divergence, beta=options.resolved_beta,
            mask=rows.labels >= 0, temperature=options.temperature, t_squared=options.t_squared, vocab=options.vocab,
            reduction="sum",
        )  # fmt: skip
        return loss, rows.num_labels, {}

    def _topk_loss(self, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor, dict[str, Measured]]:
        options, kept = self.distillation, rows.labels >= 0
        ids, log_probs = rows.extras.get(TOPK_IDS), rows.extras.get(TOPK_LOG_PROBS)
        if (ids is None) != (log_probs is None):
            raise ValueError(f"batch must have both of {TOPK_IDS!r} and {TOPK_LOG_PROBS!r}, got {sorted(rows.extras)}")
        temperature, support = self._stored_temperature, kept[..., None]
        if ids is None or log_probs is None:
            teacher_logits, temperature = self._teacher_logits(rows), options.temperature
            with torch.no_grad():
                supports = {"student": (logits,), "union": (teacher_logits, logits)}
                top_ids = [
                    each.detach().topk(min(options.distillation_topk, each.shape[-1]), dim=-1).indices
                    for each in supports.get(options.distillation_support, (teacher_logits,))
                ]
                ids = torch.cat(top_ids, dim=-1)
                is_common = ids < num_common_columns(logits.shape[-1], teacher_logits.shape[-1], options.vocab)
                ids = ids.masked_fill(~is_common, 0)
                log_probs = topk_log_probs(teacher_logits, ids, temperature=temperature, mask=kept)
            support = support & is_common
            if options.distillation_support == "union":
                support = support & first_occurrences(ids.masked_fill(~is_common, -1))
        student_log_probs = topk_log_probs(
            logits, ids, temperature=options.temperature, renormalize=options.support_mode == "renormalize", mask=kept
        )
        losses, metrics = sparse_divergence(
            student_log_probs, log_probs, options.sparse(temperature), support_mask=support.expand(ids.shape)
        )
        names = metrics.keys() & self.metric_kinds()
        return losses.sum(), rows.num_labels, {name: Mean(metrics[name].sum(), rows.num_labels) for name in names}

    def _sampled_loss(self, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor, dict[str, Measured]]:
        options, targets = self.distillation.sampled, rows.labels
        teacher, old = self._teacher_log_probs(rows).flatten(), rows.extras.get(OLD_LOG_PROBS)
        old = None if old is None else _next(old).flatten()

        def divergences(scores: TokenScores, index: Any) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, old_log_probs = cast(Tensor, scores.log_probs), None if old is None else old[index]
            return sampled_divergence(log_probs.flatten(), teacher[index], options, old_log_probs=old_log_probs)

        total, scores = token_loss(
            logits, targets, lambda scores, index: divergences(scores, index)[0],
            temperature=self.distillation.temperature, outputs=("log_probs", "entropy", "correct"), detach=("entropy",),
        )  # fmt: skip
        metrics, kept, count = divergences(scores, ...)[1], targets.flatten() >= 0, rows.num_labels
        self._hidden_metrics -= metrics.keys()
        means = {name: Mean(torch.where(kept, each, 0.0).sum(), count) for name, each in metrics.items()}
        return total, count, _label_metrics(scores, rows) | means

    def _uld_loss(self, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor, dict[str, Measured]]:
        columns = rows.extras
        if self.context is not None:
            raise ValueError("context_parallel_size must be 1 for 'uld', which compares rows of different lengths")
        if rows.positions is not None:
            raise ValueError("batch must have one text per row for 'uld' (data.padding_free=False), got 'position_ids'")
        names = [name for name in columns if name.startswith("teacher_") and name not in _COLUMNS]
        batch = {name.removeprefix("teacher_"): columns[name] for name in names}
        teacher_tokens = read_tokens("teacher", batch, self._seen(self._required_teacher()))
        pair = logits, self._teacher_logits(teacher_tokens)
        masks = [each.labels >= 0 for each in (rows, teacher_tokens)]
        number = torch.minimum(*(mask.sum(-1) for mask in masks))[:, None]
        masks = [mask & (mask.cumsum(-1) <= number) for mask in masks]  # as many in one as in the other
        student, teacher = (each[mask] for each, mask in zip(pair, masks, strict=True))
        divergence = partial(universal_logit_divergence, options=self.distillation.uld)
        size = student.shape[-1] + teacher.shape[-1]
        chunk_size = choose_chunk_size(len(student), size, _BYTES_PER_LOGIT, _CHUNK_BYTES)
        losses: Tensor = over_chunks(divergence, [logit_rows(student), logit_rows(teacher.detach())], [], chunk_size)
        factor = self.distillation.temperature**2 if self.distillation.t_squared else 1.0
        return factor * losses.sum(), torch.count_nonzero(masks[0]), {}

    # The teacher

    def _required_teacher(self) -> nn.Module:
        self._prepare_teacher()
        if self.teacher is None:
            raise ValueError(
                f"distillation_mode={self.distillation.distillation_mode!r} needs a teacher, got None from"
                f" configure_teacher(), or stored values: {TOPK_IDS!r} and {TOPK_LOG_PROBS!r} for 'topk_logits',"
                f" {TEACHER_LOG_PROBS!r} for sampled tokens"
            )
        return self.teacher

    @torch.no_grad()
    def _teacher_logits(self, rows: Rows) -> Tensor:
        teacher = self._required_teacher()
        size = _vocab_size(teacher)
        if size is not None and size < (_vocab_size(self.model) or size + 1):
            found = int(torch.maximum(rows.inputs["input_ids"].max(), rows.labels.max()))  # the host waits
            if found >= size:
                raise ValueError(
                    f"batch must have token ids below {size}, the size of the teacher's vocabulary, got {found}: for a"
                    " teacher with another tokenizer use distillation_mode='uld' and data.teacher_tokenizer"
                )
        logits, _ = self.call_model(rows.inputs, rows.labels, teacher)
        return logits

    @torch.no_grad()
    def _teacher_log_probs(self, rows: Rows) -> Tensor:
        stored = rows.extras.get(TEACHER_LOG_PROBS)
        if stored is not None:
            return _next(stored)
        scores = token_scores(self._teacher_logits(rows), rows.labels, temperature=self.distillation.temperature)
        return cast(Tensor, scores.log_probs)

    @property
    def _stored_temperature(self) -> float:
        """The temperature of stored log-probabilities."""
        data = None if self._attached_trainer is None else getattr(self.trainer, "datamodule", None)
        given = self.distillation.teacher_temperature
        return float(getattr(data, "temperature", None) or 1.0) if given is None else given


def _check_columns(rows: Rows) -> None:
    """Raises for columns of tokens whose shape or dtype does not fit."""
    for name in _COLUMNS:
        if (value := rows.extras.get(name)) is None:
            continue
        check_tensor(f"batch[{name!r}]", value)
        if value.is_floating_point() == (name == TOPK_IDS):
            raise wrong_type(f"batch[{name!r}]", "int64" if name == TOPK_IDS else "floating-point", value)
        like = rows.extras.get(TOPK_IDS) if name == TOPK_LOG_PROBS else None
        shape = (*rows.labels.shape, *value.shape[2:3]) if name == TOPK_IDS else rows.labels.shape
        check_shape(
            f"batch[{name!r}]", value, shape if like is None else like.shape, "as input_ids or teacher_topk_ids"
        )


def _vocab_size(model: nn.Module) -> int | None:
    """The number of ids that a Hugging Face model knows, None for other models."""
    config: Any = getattr(model, "config", None)
    return getattr(config.get_text_config(), "vocab_size", None) if isinstance(config, PreTrainedConfig) else None


def _next(values: Tensor) -> Tensor:
    """Values of tokens, ``[batch_size, seq_len]``, at the token that predicts them."""
    return F.pad(values[:, 1:], (0, 1))


def _label_metrics(scores: TokenScores, rows: Rows, **sums: Tensor) -> dict[str, Measured]:
    """Means over tokens with a label."""
    sums |= {"mean_token_accuracy": cast(Tensor, scores.correct).sum(), "entropy": cast(Tensor, scores.entropy).sum()}
    return {name: Mean(total.detach(), rows.num_labels) for name, total in sums.items()}


@dataclass(frozen=True)
class TeacherOptions(Options):
    """The teacher of a finished module.

    Args:
        teacher: Folder of the teacher's Hugging Face checkpoint, or ``owner/name`` of one on the Hub. None for random
            weights with ``teacher_model_type``, or if the data contain the teacher's outputs.
        teacher_model_type: Architecture of a teacher with random weights, for experiments.
        teacher_config: The architecture's settings where they differ from its defaults.
        teacher_dtype: The teacher's dtype; None for the student's.
        teacher_revision: Branch, tag or commit of ``teacher`` on the Hub; None for its main branch.
    """

    teacher: str | None = None
    teacher_model_type: str | None = None
    teacher_config: dict[str, Any] | None = None
    teacher_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    teacher_revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path("teacher", self.teacher, optional=True)
        check_for_repository("teacher_revision", self.teacher_revision, self.teacher)
        if self.teacher is not None and self.teacher_model_type is not None:
            raise wrong_value("teacher_model_type", "None where teacher is a folder", self.teacher_model_type)
        if self.teacher_config is not None and self.teacher is None and self.teacher_model_type is None:
            raise wrong_value("teacher_config", "None without teacher or teacher_model_type", self.teacher_config)
        if self.teacher_model_type is not None:
            self.build_config()

    @cached_property
    def folder(self) -> Path | None:
        """The teacher's folder with its config.json, None without one."""
        return checkpoint_folder("teacher", self.teacher, self.teacher_revision)

    def build_config(self) -> PreTrainedConfig | None:
        """The teacher's configuration, None without a teacher; names the teacher's arguments in errors."""
        if self.teacher is None and self.teacher_model_type is None:
            return None
        try:
            return build_config(self.folder, self.teacher_model_type or "llama", self.teacher_config)
        except (TypeError, ValueError) as error:
            text = str(error)
            name = "teacher" if text.startswith("pretrained") else "teacher_"
            raise type(error)(name + text.removeprefix("pretrained")) from None


@takes(teacher_options=TeacherOptions, distillation=DistillationOptions)
class LigerDistillation(LigerDistillationMixin, LossCausalLM):
    """A causal language model that learns from a teacher.

    Arguments are ``teacher``, the teacher's checkpoint, with ``teacher_revision``, or ``teacher_model_type``;
    ``teacher_config`` and ``teacher_dtype``; ``shard_teacher``; the options of
    :class:`~lightning_liger.DistillationOptions`, whose ``temperature`` is named
    ``distillation_temperature``, as ``temperature`` is that of ``predict``; and for the student those of
    :class:`~lightning_liger.LigerCausalLM`.

    Raises:
        FileNotFoundError: As :class:`~lightning_liger.LigerCausalLM`; for the teacher when a stage begins.
        TypeError: For an argument of a wrong type.
        ValueError: For an argument out of its range, and for both a folder and an architecture of the teacher.
    """

    teacher_options: TeacherOptions
    _renamed: ClassVar[dict[str, str]] = {"temperature": "distillation_temperature"}

    def prepare_data(self) -> None:
        super().prepare_data()
        if not self.trainer.predicting and self.teacher_options.folder is not None:
            download_weights("teacher", str(self.teacher_options.teacher), self.teacher_options.folder)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "predict":
            self.teacher_options.build_config()  # raises before work starts

    def configure_teacher(self) -> nn.Module | None:
        config, name = self.teacher_options.build_config(), self.teacher_options.teacher_dtype
        if config is None:
            return None
        dtype = next(self.model.parameters()).dtype if name is None else getattr(torch, name)
        device = torch.device("meta") if self.shard_teacher else self.device
        return build_frozen(config, self.teacher_options.folder, device, dtype)
