"""A causal language model that learns the answers of multiple-choice questions, with its accuracy among the choices."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from liger_ops import IGNORE_INDEX
from liger_ops.arguments import check_integer, check_shape, check_tensor
from lightning_liger.lazy.logits import lazy_logits
from lightning_liger.lazy.scores import token_scores
from lightning_liger.post_training.rows import read_rows
from lightning_liger.training.causal_lm import LigerCausalLM
from lightning_liger.training.metrics import RunningMean, RunningMetric
from lightning_liger.training.mixin import LMLoss
from lightning_liger.training.protocol import engine_of

_ACCURACIES = ("choice_accuracy", "choice_accuracy_norm")
_COLUMNS = ("question_ids", "is_answer", "num_characters")  # of each choice


class LigerMultipleChoice(LigerCausalLM):
    """A Hugging Face causal language model on multiple-choice questions.

    Data are those of :class:`~lightning_liger.data.MultipleChoiceDataModule`. It is trained on the correct answers, as
    :class:`~lightning_liger.LigerCausalLM` is. Validation and test compute the log-probability of each choice, and log,
    besides loss, perplexity and accuracy over the tokens of correct answers:

    - ``{val,test}_choice_accuracy``: the share of questions whose correct choice has the largest log-probability. In
      ties the first counts.
    - ``{val,test}_choice_accuracy_norm``: the same where log-probabilities are divided by the number of characters of
      the choice, so that long answers are not at a disadvantage.

    Both are exact over batches and ranks. All arguments and errors are those of
    :class:`~lightning_liger.LigerCausalLM`.
    """

    def _make_metrics(self) -> dict[str, RunningMetric]:
        return super()._make_metrics() | {name: RunningMean() for name in _ACCURACIES}

    def _step(self, stage: str, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, int | None]:
        if stage == "train":
            return super()._step(stage, batch)
        context = None if self._attached_trainer is None else engine_of(self.trainer).context_parallel
        rows = read_rows(batch).to_context(context)
        _check_choices(batch, rows.num_sequences)
        question_ids, is_answer, num_characters = (batch[name] for name in _COLUMNS)
        is_answer = is_answer.bool()
        labels, model = rows.labels, self._seen_model()
        with lazy_logits():
            output, auxiliary, _ = model(rows.inputs, labels)
            scores = token_scores(output.logits, labels, outputs=("log_probs", "predictions"))
        log_probs = cast(Tensor, scores.log_probs)
        sums = rows.sums(log_probs)
        if context is not None:
            dist.all_reduce(sums, group=context.group)
        is_of = question_ids == torch.arange(batch["num_questions"], device=sums.device)[:, None]
        metrics, _ = self._stage_metrics(stage)
        for name, values in zip(_ACCURACIES, (sums, sums / num_characters), strict=True):
            chosen = torch.where(is_of, values, -math.inf).argmax(-1)
            metrics[name].update(is_answer[chosen].sum(), batch["num_questions"])
        self._log_metrics(stage, _ACCURACIES)
        in_answer = is_answer[:, None] if rows.sequence_ids is None else is_answer[rows.sequence_ids.clamp(min=0)]
        kept = (labels != IGNORE_INDEX) & in_answer
        num_tokens, loss_sum = kept.sum(), -torch.where(kept, log_probs, 0).sum()
        loss = loss_sum / num_tokens.clamp(min=1)
        num_correct = ((scores.predictions == labels) & kept).sum()
        self._log_tokens(stage, LMLoss(loss, loss_sum, num_tokens, num_correct), auxiliary)
        return loss, num_tokens, None


def _check_choices(batch: Mapping[str, Any], num_sequences: int) -> None:
    if missing := [name for name in (*_COLUMNS, "num_questions") if batch.get(name) is None]:
        raise ValueError(f"batch must have the key {missing[0]!r} of all choices, got {sorted(map(str, batch))}")
    check_integer("batch['num_questions']", batch["num_questions"], at_least=1)
    for name in _COLUMNS:
        check_tensor(f"batch[{name!r}]", batch[name])
        check_shape(f"batch[{name!r}]", batch[name], (num_sequences,), "one for each choice")
