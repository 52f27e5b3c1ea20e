"""Knowledge distillation from a frozen teacher, its stored top-k, or its log-probabilities of sampled tokens."""

import os
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from liger_ops import TokenScores
from liger_ops.arguments import (
    check_bool,
    check_choice,
    check_path,
    check_shape,
    check_tensor,
    wrong_type,
    wrong_value,
)
from liger_ops.divergence.options import num_common_columns
from lightning_liger.lazy.scores import divergence, token_loss, token_scores, topk_log_probs
from lightning_liger.losses.distillation import (
    first_occurrences,
    sampled_divergence,
    sparse_divergence,
)
from lightning_liger.post_training.alignment import aligned_tokens, universal_logit_loss
from lightning_liger.post_training.base import LigerPostTrainingMixin, StepLoss, Term
from lightning_liger.post_training.causal_lm import options_of, refuse_loss_type
from lightning_liger.losses.distillation_options import DistillationOptions
from lightning_liger.post_training.metrics import Mean, Measured, Total
from lightning_liger.post_training.rows import count_tokens
from lightning_liger.post_training.teacher import build_frozen, prepare_frozen
from lightning_liger.post_training.tokens import TokenRows, document_positions, num_kept, read_tokens
from lightning_liger.training.architecture import build_config
from lightning_liger.training.causal_lm import LigerCausalLM

TOPK_IDS, TOPK_LOG_PROBS = "teacher_topk_ids", "teacher_topk_log_probs"
TEACHER_LOG_PROBS, OLD_LOG_PROBS = "teacher_per_token_logps", "old_per_token_logps"
_COLUMNS = (TOPK_IDS, TOPK_LOG_PROBS, TEACHER_LOG_PROBS, OLD_LOG_PROBS)
_OF_ROLLOUTS = ("advantages", "rewards", "group_ids", "ref_per_token_logps", "sampling_per_token_logps")
"""Keys of rollouts that distillation does not need."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LigerDistillationMixin(LigerPostTrainingMixin):
    """Training, validation and test steps of a student, whose losses never materialize logits.

    List it before the base class, put the student into ``self.model``, and return the teacher from
    :meth:`configure_teacher`, unless batches have what is needed of it::

        class Student(LigerDistillationMixin, L.LightningModule):
            distillation = DistillationOptions(divergence="reverse_kl")

            def configure_model(self):
                if getattr(self, "model", None) is None:  # Lightning calls this for each stage
                    self.model = AutoModelForCausalLM.from_pretrained(student)

            def configure_teacher(self):
                return AutoModelForCausalLM.from_pretrained(teacher)

    Batches are those of ``LigerLMMixin``, or have ``completion_mask`` in place of ``labels``. Tokens without a label do
    not count. Further keys, each used by the mode that needs it:

    - ``teacher_topk_ids`` (int64) and ``teacher_topk_log_probs``, ``[batch_size, seq_len, K]``: as logits, those at a
      token are about the next one; -inf where there are fewer than K. ``"topk_logits"`` then needs no teacher.
    - ``teacher_per_token_logps``, ``[batch_size, seq_len]``: each at its token. ``"sampled_token"`` then needs no
      teacher.
    - ``old_per_token_logps``, ``[batch_size, seq_len]``: of the policy that sampled the tokens.
    - ``teacher_input_ids``, ``teacher_labels`` and others with that prefix: for ``"uld"``, which needs them, the same
      text in the teacher's tokens. The i-th labelled token of a row is compared with the i-th of the other.

    The loss is the mean over the labelled tokens of the whole optimizer step, whatever its micro-batches and ranks.
    The teacher is frozen, in evaluation mode, on each rank whole or sharded over all of them, whatever engine trains
    the student; it is in no checkpoint and no optimizer.

    Each stage logs ``loss``, ``distillation_loss``, ``num_tokens`` and, where they exist, ``cross_entropy``,
    ``entropy``, ``mean_token_accuracy``, ``student_mass`` and ``teacher_mass`` (of the K ids), ``log_ratio``,
    ``importance_weight``.

    Attributes:
        distillation: See :class:`DistillationOptions`.
        shard_teacher: Whether all ranks share the teacher's parameters.
    """

    distillation: DistillationOptions = DistillationOptions()
    shard_teacher: bool = False
    _units = "tokens"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self.distillation, DistillationOptions):
            raise wrong_type("distillation", "DistillationOptions", self.distillation)
        check_bool("shard_teacher", self.shard_teacher)
        super().__init__(*args, **kwargs)
        self._hidden_metrics = {"importance_weight"}  # until data have old_per_token_logps
        self._teacher: tuple[nn.Module, ...] = ()  # in a tuple, so that no engine and no checkpoint sees it

    def configure_teacher(self) -> nn.Module | None:
        """Returns the teacher, None if batches have all that is needed. Called once, when a stage begins."""
        return None

    @property
    def teacher(self) -> nn.Module | None:
        """The frozen teacher; None if there is none, or if no stage has begun."""
        return self._teacher[0] if self._teacher else None

    def _begin_stage(self) -> None:
        super()._begin_stage()
        self._prepare_teacher()

    def _prepare_teacher(self) -> None:
        if self._teacher:
            return
        teacher = self.configure_teacher()
        if teacher is None:
            return
        if not isinstance(teacher, nn.Module):
            raise wrong_type("configure_teacher()", "a module or None", teacher)
        self._teacher = (prepare_frozen(teacher, self.device, context=self.context, is_sharded=self.shard_teacher),)

    def metric_kinds(self) -> dict[str, str]:
        options = self.distillation
        names, kinds = ["distillation_loss"], {"num_tokens": "sum"}
        if options.crossentropy_weight:
            names += ["cross_entropy"]
        if self._scores_labels or options.log_entropy:
            names += ["entropy", "mean_token_accuracy"]
        if options.distillation_mode == "topk_logits":
            names += ["teacher_mass", *(["student_mass"] if options.support_mode != "renormalize" else [])]
        if options.distillation_mode == "sampled_token":
            names += ["log_ratio", "importance_weight"]
        return dict.fromkeys(names, "mean") | kinds

    @property
    def _scores_labels(self) -> bool:
        """Whether the loss reads scores of the labels, so that their entropy costs nothing."""
        options = self.distillation
        return options.distillation_mode == "sampled_token" or options.crossentropy_weight > 0

    def step_loss(self, stage: str, batch: Mapping[str, Any]) -> StepLoss:
        options = self.distillation
        rows = read_tokens(stage, batch, self._seen_model(), (*_COLUMNS, *_OF_ROLLOUTS), ("teacher_",))
        if ("teacher_input_ids" in rows.columns) != (options.distillation_mode == "uld"):
            raise ValueError(
                "batch must have 'teacher_input_ids' and 'teacher_labels', the text in the teacher's tokens"
                " (data.teacher_tokenizer), for distillation_mode='uld' only, got"
                f" {sorted(map(str, batch))} for {options.distillation_mode!r}"
            )
        num_tokens = count_tokens(rows.targets, rows.inputs.get("attention_mask"), rows.columns.get("sequence_ids"))
        rows = _checked(rows).to_context(self.context)
        logits, auxiliary = self.call_model(rows.inputs, rows.targets)
        compute = {
            "full_logits": self._full_loss,
            "topk_logits": self._topk_loss,
            "sampled_token": self._sampled_loss,
            "uld": self._uld_loss,
        }[options.distillation_mode]
        loss, count, measured = compute(logits, rows)
        measured["distillation_loss"] = Mean(loss.detach(), count)
        measured["num_tokens"] = Total(num_tokens / self._ranks_per_batch)
        total = options.distillation_weight * loss
        if options.crossentropy_weight:
            cross_entropy, quantities = _cross_entropy(logits, rows.targets, with_entropy="entropy" not in measured)
            total = total + options.crossentropy_weight * cross_entropy
            measured = quantities | measured
        elif options.log_entropy and "entropy" not in measured:
            with torch.no_grad():
                scores = token_scores(logits.detach(), rows.targets, outputs=("entropy", "correct"))
            measured |= _of_labels(scores, rows.targets)
        return StepLoss((Term(total, count, "tokens", is_whole=False),), measured, auxiliary)

    # One loss each: the sum over tokens, their number, and what is measured

    def _full_loss(self, logits: Tensor, rows: TokenRows) -> tuple[Tensor, Tensor, dict[str, Measured]]:
        options = self.distillation
        loss = divergence(
            logits, self._teacher_logits(rows), kind=options.divergence, beta=options.resolved_beta,
            mask=rows.targets >= 0, temperature=options.temperature, t_squared=options.t_squared, vocab=options.vocab,
            reduction="sum",
        )  # fmt: skip
        return loss, num_kept(rows.targets), {}

    def _topk_loss(self, logits: Tensor, rows: TokenRows) -> tuple[Tensor, Tensor, dict[str, Measured]]:
        options, kept = self.distillation, rows.targets >= 0
        ids, log_probs = rows.columns.get(TOPK_IDS), rows.columns.get(TOPK_LOG_PROBS)
        if (ids is None) != (log_probs is None):
            raise ValueError(f"batch must have both of {TOPK_IDS!r} and {TOPK_LOG_PROBS!r}, got {sorted(rows.columns)}")
        temperature, support = self._stored_temperature, kept[..., None]
        if ids is None or log_probs is None:
            teacher_logits, temperature = self._teacher_logits(rows), options.temperature
            with torch.no_grad():
                ids = _support(logits.detach(), teacher_logits, options.distillation_topk, options.distillation_support)
                is_common = ids < num_common_columns(logits.shape[-1], teacher_logits.shape[-1], options.vocab)
                ids = ids.masked_fill(~is_common, 0)
                log_probs = topk_log_probs(teacher_logits, ids, temperature=temperature, mask=kept)
            support = support & is_common
            if options.distillation_support == "union":
                support = support & first_occurrences(ids.masked_fill(~is_common, -1))
        of_student = topk_log_probs(
            logits, ids, temperature=options.temperature, renormalize=options.support_mode == "renormalize", mask=kept
        )
        losses, metrics = sparse_divergence(
            of_student, log_probs, options.sparse(temperature), support_mask=support.expand(ids.shape)
        )
        count = num_kept(rows.targets)
        names = self.metric_kinds()
        return losses.sum(), count, {name: Mean(each.sum(), count) for name, each in metrics.items() if name in names}

    def _sampled_loss(self, logits: Tensor, rows: TokenRows) -> tuple[Tensor, Tensor, dict[str, Measured]]:
        options, targets = self.distillation, rows.targets
        teacher = self._teacher_log_probs(rows).flatten()
        old = rows.columns.get(OLD_LOG_PROBS)
        old = None if old is None else _next(old).flatten()

        def loss(scores: TokenScores, index: Tensor) -> Tensor:
            assert scores.log_probs is not None
            of_old = None if old is None else old[index]
            return sampled_divergence(scores.log_probs, teacher[index], options.sampled, old_log_probs=of_old)[0]

        total, scores = token_loss(
            logits, targets, loss, temperature=options.temperature, outputs=("log_probs", "entropy", "correct"),
            detach=("entropy",),
        )  # fmt: skip
        assert scores.log_probs is not None
        of_all = None if old is None else old.view_as(targets)
        _, metrics = sampled_divergence(
            scores.log_probs, teacher.view_as(targets), options.sampled, old_log_probs=of_all
        )
        kept, count = targets >= 0, num_kept(targets)
        measured: dict[str, Measured] = {
            name: Mean(torch.where(kept, each, 0.0).sum(), count) for name, each in metrics.items()
        }
        self._hidden_metrics -= measured.keys()
        return total, count, measured | _of_labels(scores, targets)

    def _uld_loss(self, logits: Tensor, rows: TokenRows) -> tuple[Tensor, Tensor, dict[str, Measured]]:
        columns = rows.columns
        if self.context is not None:
            raise ValueError("context_parallel_size must be 1 for 'uld', which compares rows of different lengths")
        if document_positions(rows.inputs) is not None:
            raise ValueError("batch must have one text a row for 'uld' (data.packing=False), got 'position_ids'")
        others = columns.keys() - {*_COLUMNS, *_OF_ROLLOUTS}
        batch = {name.removeprefix("teacher_"): columns[name] for name in others if name.startswith("teacher_")}
        of_teacher = read_tokens("teacher", batch, self._seen(self._required_teacher()))
        pair = logits, self._teacher_logits(of_teacher)
        of_both = aligned_tokens(rows.targets >= 0, of_teacher.targets >= 0)
        student, teacher = (each[mask] for each, mask in zip(pair, of_both, strict=True))
        losses = universal_logit_loss(student, teacher, self.distillation.uld)
        factor = self.distillation.temperature**2 if self.distillation.t_squared else 1.0
        return factor * losses.sum(), torch.count_nonzero(of_both[0]), {}

    # The teacher

    def _required_teacher(self) -> nn.Module:
        if self.teacher is None:
            self._prepare_teacher()
        if self.teacher is None:
            mode = self.distillation.distillation_mode
            raise ValueError(
                f"distillation_mode={mode!r} needs a teacher, got None from configure_teacher(), or stored values:"
                f" {TOPK_IDS!r} and {TOPK_LOG_PROBS!r} for 'topk_logits', {TEACHER_LOG_PROBS!r} for sampled tokens"
            )
        return self.teacher

    @torch.no_grad()
    def _teacher_logits(self, rows: TokenRows) -> Tensor:
        teacher = self._required_teacher()
        size = _vocab_size(teacher)
        if size is not None and size < (_vocab_size(self.model) or size + 1):
            found = int(torch.maximum(rows.inputs["input_ids"].max(), rows.targets.max()))  # the host waits
            if found >= size:
                raise ValueError(
                    f"batch must have token ids below {size}, the size of the teacher's vocabulary, got {found}: a"
                    " teacher with a smaller vocabulary has to know all tokens of the text. For one with another"
                    " tokenizer use distillation_mode='uld' and data.teacher_tokenizer"
                )
        logits, _ = self.call_model(rows.inputs, rows.targets, teacher)
        return logits

    @torch.no_grad()
    def _teacher_log_probs(self, rows: TokenRows) -> Tensor:
        stored = rows.columns.get(TEACHER_LOG_PROBS)
        if stored is not None:
            return _next(stored)
        scores = token_scores(self._teacher_logits(rows), rows.targets, temperature=self.distillation.temperature)
        return cast(Tensor, scores.log_probs)

    @property
    def _stored_temperature(self) -> float:
        """The temperature of stored log-probabilities."""
        if self.distillation.teacher_temperature is not None:
            return self.distillation.teacher_temperature
        data = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
        found = getattr(data, "temperature", None)
        return float(found) if isinstance(found, int | float) else 1.0


def _checked(rows: TokenRows) -> TokenRows:
    """The rows; raises for columns of tokens whose shape or dtype does not fit."""
    shape = rows.targets.shape
    for name in _COLUMNS:
        value = rows.columns.get(name)
        if value is None:
            continue
        check_tensor(f"batch[{name!r}]", value)
        if value.is_floating_point() == (name == TOPK_IDS):
            raise wrong_type(f"batch[{name!r}]", "int64" if name == TOPK_IDS else "floating-point", value)
        expected = (*shape, value.shape[-1]) if name in (TOPK_IDS, TOPK_LOG_PROBS) and value.ndim == 3 else tuple(shape)
        check_shape(f"batch[{name!r}]", value, expected, "one entry for each token of the inputs")
    ids, log_probs = rows.columns.get(TOPK_IDS), rows.columns.get(TOPK_LOG_PROBS)
    if ids is not None and log_probs is not None:
        check_shape(f"batch[{TOPK_LOG_PROBS!r}]", log_probs, ids.shape, f"as {TOPK_IDS}")
    return rows


def _vocab_size(model: nn.Module) -> int | None:
    """The number of ids that a Hugging Face model knows, None for other models."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else None
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) else None


def _next(values: Tensor) -> Tensor:
    """Values of tokens, ``[batch_size, seq_len]``, at the token that predicts them."""
    return F.pad(values[:, 1:], (0, 1))


def _support(student_logits: Tensor, teacher_logits: Tensor, top_k: int, support: str) -> Tensor:
    """The likeliest ids of each token, ``[..., K]``, or those of both models."""
    chosen = {"teacher": (teacher_logits,), "student": (student_logits,), "union": (teacher_logits, student_logits)}
    found = [logits.topk(min(top_k, logits.shape[-1]), dim=-1).indices for logits in chosen[support]]
    return torch.cat(found, dim=-1)


def _cross_entropy(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, dict[str, Measured]]:
    """The sum of cross entropies of the labels, and what is measured on them."""
    outputs = ("log_probs", "entropy", "correct") if with_entropy else ("log_probs", "correct")

    def negative(scores: TokenScores, index: Tensor) -> Tensor:
        assert scores.log_probs is not None
        return -scores.log_probs

    loss, scores = token_loss(logits, targets, negative, outputs=outputs, detach=("entropy",) if with_entropy else ())
    return loss, {"cross_entropy": Mean(loss.detach(), num_kept(targets)), **_of_labels(scores, targets)}


def _of_labels(scores: TokenScores, targets: Tensor) -> dict[str, Measured]:
    count, correct = num_kept(targets), cast(Tensor, scores.correct)
    measured: dict[str, Measured] = {"mean_token_accuracy": Mean(correct.sum(), count)}
    if scores.entropy is not None:
        measured["entropy"] = Mean(scores.entropy.detach().sum(), count)
    return measured


class LigerDistillation(LigerDistillationMixin, LigerCausalLM):
    """A causal language model that learns from a teacher.

    As :class:`~lightning_liger.LigerCausalLM`, whose arguments it takes too, for the student.

    Args:
        teacher: Folder of the teacher's Hugging Face checkpoint. None for random weights with ``teacher_model_type``,
            or if the data has what is needed of the teacher.
        teacher_model_type: Architecture of a teacher with random weights, for trying things out.
        teacher_config: The architecture's settings where they differ from its defaults.
        teacher_dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None for the student's.
        shard_teacher: Whether all ranks share the teacher's parameters, so that it need not fit one device.
        distillation_mode: As the next ones: see :class:`~lightning_liger.DistillationOptions`.
        divergence: See :class:`~lightning_liger.DistillationOptions`.
        beta: See :class:`~lightning_liger.DistillationOptions`.
        distillation_temperature: Divides the logits of both; ``temperature`` is that of ``predict``.
        teacher_temperature: See :class:`~lightning_liger.DistillationOptions`.
        t_squared: See :class:`~lightning_liger.DistillationOptions`.
        vocab: See :class:`~lightning_liger.DistillationOptions`.
        support_mode: See :class:`~lightning_liger.DistillationOptions`.
        distillation_topk: See :class:`~lightning_liger.DistillationOptions`.
        distillation_support: See :class:`~lightning_liger.DistillationOptions`.
        estimator: See :class:`~lightning_liger.DistillationOptions`.
        distillation_is_clip: See :class:`~lightning_liger.DistillationOptions`.
        crossentropy_weight: See :class:`~lightning_liger.DistillationOptions`.
        distillation_weight: See :class:`~lightning_liger.DistillationOptions`.
        log_entropy: See :class:`~lightning_liger.DistillationOptions`.
        **kwargs: See :class:`~lightning_liger.LigerCausalLM`.

    Raises:
        FileNotFoundError: As :class:`~lightning_liger.LigerCausalLM`; for the teacher when a stage begins.
        TypeError: For an argument of a wrong type.
        ValueError: For an argument out of its range, and for both a folder and an architecture of the teacher.
    """

    def __init__(
        self,
        teacher: str | None = None,
        teacher_model_type: str | None = None,
        teacher_config: dict[str, Any] | None = None,
        teacher_dtype: str | None = None,
        shard_teacher: bool = False,
        distillation_mode: str = "full_logits",
        divergence: str = "forward_kl",
        beta: float | None = None,
        distillation_temperature: float = 1.0,
        teacher_temperature: float | None = None,
        t_squared: bool = False,
        vocab: str = "equal",
        support_mode: str = "tail",
        distillation_topk: int = 100,
        distillation_support: str = "teacher",
        estimator: str = "policy_gradient",
        distillation_is_clip: float | None = 2.0,
        crossentropy_weight: float = 0.0,
        distillation_weight: float = 1.0,
        log_entropy: bool = False,
        **kwargs: Any,
    ) -> None:
        self.distillation = options_of(DistillationOptions, {**locals(), "temperature": distillation_temperature})
        self.shard_teacher = shard_teacher
        check_choice("teacher_dtype", teacher_dtype, (None, *_DTYPES))
        check_path("teacher", teacher, optional=True)
        if teacher is not None and teacher_model_type is not None:
            raise wrong_value("teacher_model_type", "None where teacher is a folder", teacher_model_type)
        if teacher is None and teacher_model_type is None and teacher_config is not None:
            raise wrong_value("teacher_config", "None without teacher or teacher_model_type", teacher_config)
        if teacher_model_type is not None:
            _config_of_teacher(None, teacher_model_type, teacher_config)
        if isinstance(teacher, os.PathLike):  # hyperparameters in checkpoints are plain objects
            teacher = os.fspath(teacher)
        refuse_loss_type(kwargs)
        super().__init__(loss_type="nll", **kwargs)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "predict":
            self._build_teacher_config()  # raises before work starts

    def _build_teacher_config(self) -> PreTrainedConfig | None:
        settings = self._settings
        if settings.teacher is None and settings.teacher_model_type is None:
            return None
        return _config_of_teacher(settings.teacher, settings.teacher_model_type or "llama", settings.teacher_config)

    def configure_teacher(self) -> nn.Module | None:
        config = self._build_teacher_config()
        if config is None:
            return None
        name = self._settings.teacher_dtype
        dtype = next(self.model.parameters()).dtype if name is None else _DTYPES[name]
        device = torch.device("meta") if self.shard_teacher else self.device
        return build_frozen(config, self._settings.teacher, device, dtype)


def _config_of_teacher(teacher: str | None, model_type: str, settings: dict[str, Any] | None) -> PreTrainedConfig:
    """As :func:`~lightning_liger.training.architecture.build_config`, with the teacher's arguments in errors."""
    try:
        return build_config(teacher, model_type, settings)
    except (FileNotFoundError, TypeError, ValueError) as error:
        text = str(error)
        name = "teacher" if text.startswith("pretrained") else "teacher_"
        raise type(error)(name + text.removeprefix("pretrained")) from None
