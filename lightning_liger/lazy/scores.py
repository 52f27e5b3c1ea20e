"""Scores and losses of a model's logits, lazy or materialized: what losses of post-training are made of.

Lazy logits lead to the fused ops of :mod:`liger_ops.log_probs` and :mod:`liger_ops.divergence`, under every engine.
Materialized ones (an unpatched model's) are read in chunks of tokens, so that no second tensor of their size is made.
Both give the same values: in float32, or float64 for float64 logits.

Labels are aligned with the logits: ``labels[..., t]`` is what ``logits[..., t, :]`` predicts; the caller shifts them.
Formulas: :mod:`liger_ops.log_probs.scores`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from liger_ops import TokenScores, linear_log_probs, linear_token_loss, linear_topk_log_probs
from liger_ops.arguments import (
    check_bool,
    check_choice,
    check_floating,
    check_integer,
    check_same_device,
    check_shape,
    shown,
    wrong_type,
    wrong_value,
)
from liger_ops.divergence.divergence import divergence as divergence_of_logits
from liger_ops.divergence.options import DivergenceOptions, num_common_columns
from liger_ops.log_probs.linear_token_loss import join_units
from liger_ops.log_probs.scores import DIFFERENTIABLE, OUTPUTS, check_outputs, check_temperature, scores_reference
from liger_ops.loss.options import IGNORE_INDEX, REDUCTIONS, check_labels, check_tokens
from lightning_liger.lazy.chunks import Rows, choose_tokens, over_chunks
from lightning_liger.lazy.logits import LazyLogits, as_lazy

TokenLoss = Callable[[TokenScores, Tensor], Tensor]
"""From the scores of some tokens and their indices in the flattened labels, ``[n]`` each, to their losses, ``[n]``."""
_OPTIONS = ("temperature", "outputs", "detach", "ignore_index", "saved_logits_bytes", "chunk_bytes")


def token_scores(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    outputs: Sequence[str] = ("log_probs",),
    detach: Sequence[str] = (),
    ignore_index: int = IGNORE_INDEX,
    saved_logits_bytes: int | None = None,
    chunk_bytes: int | None = None,
) -> TokenScores:
    """Scores of each token: its label's log-probability, entropy, log-sum-exp, mean logit, prediction.

    Args:
        logits: ``[..., vocab_size]``, lazy or materialized, any floating-point dtype.
        labels: Class indices, int64, ``[...]``; those equal to ``ignore_index`` cost nothing with lazy logits.
        temperature: Divides the logits: a positive number, or a tensor ``[...]`` of one for each token.
        outputs: The names of the fields of :class:`~liger_ops.TokenScores` that are wanted.
        detach: Outputs whose gradient is not wanted.
        ignore_index: Label of tokens whose scores are 0.
        saved_logits_bytes: Budget for lazy logits that are saved for backward, which computes all others once more. By
            default the option of the model's head, or 0.
        chunk_bytes: Budget for one chunk of logits. By default the option of the model's head.

    Returns:
        The scores in the labels' shape; None where not asked for. ``log_probs``, ``entropy``, ``lse`` and
        ``mean_logit`` are differentiable.

    Raises:
        TypeError: For arguments of another type.
        ValueError: For shapes, devices or options that do not fit, for labels out of range if they are on the CPU.
        RuntimeError: If the tensors that lazy logits are computed from were modified.
    """
    logits = as_lazy(logits)
    given = temperature, outputs, detach, ignore_index, saved_logits_bytes, chunk_bytes
    labels, options = _checked(logits, labels, *given)
    lazy = _fused(logits, outputs)
    if lazy is None:
        return _scores_of_rows(logits, labels, options)
    dtype = _dtype(logits)
    scores = lazy.fused_loss(linear_log_probs, labels, **options)
    return TokenScores(*(each.to(dtype) if each is not None and each.is_floating_point() else each for each in scores))


def token_loss(
    logits: Tensor,
    labels: Tensor,
    loss: TokenLoss,
    *,
    units: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    outputs: Sequence[str] = ("log_probs",),
    detach: Sequence[str] = (),
    ignore_index: int = IGNORE_INDEX,
    saved_logits_bytes: int | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, TokenScores]:
    """The sum of a loss of single tokens, or of units of them, over all tokens, and their scores.

    With lazy logits ``loss`` is called for one chunk of tokens after the other, and a step costs three products of the
    head's size (two if the head is frozen), whatever the loss is.

    Args:
        logits: As for :func:`token_scores`, like all arguments that are not listed.
        labels: Class indices, int64, ``[...]``.
        loss: Gets the scores of n tokens, ``[n]`` each, and the tokens' indices in the flattened labels, ``[n]``;
            returns their losses, ``[n]``, each a differentiable function of its own token's scores. It may be called
            more than once, with any of the tokens that are not ignored.
        units: As for :func:`liger_ops.linear_token_loss`: the number of each token's unit, such as its preference pair,
            int64, ``[...]``. ``loss`` gets whole units then, and losses may depend on all tokens of their unit.

    Returns:
        The sum of the losses, differentiable; and the scores of all tokens, which are not.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`token_scores`.
    """
    logits = as_lazy(logits)
    given = temperature, outputs, detach, ignore_index, saved_logits_bytes, chunk_bytes
    labels, options = _checked(logits, labels, *given)
    units = None if units is None else join_units(_whole(units), labels).view(labels.shape)
    if (lazy := _fused(logits, outputs)) is not None:
        return lazy.fused_loss(linear_token_loss, labels, loss, units=units, **options)
    scores = _scores_of_rows(logits, labels, options)
    index = (labels.reshape(-1) != ignore_index).nonzero()[:, 0]
    kept = TokenScores(*(None if score is None else score.reshape(-1)[index] for score in scores))
    total = loss(kept, index).sum()
    return total, TokenScores(*(None if score is None else score.detach() for score in scores))


def topk_log_probs(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    renormalize: bool = False,
    mask: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Log-probabilities of given classes of each token, ``[..., K]``, differentiable.

    Args:
        logits: ``[..., vocab_size]``, lazy or materialized.
        ids: Class indices, int64, ``[..., K]``, such as a teacher's largest. Negative ones are padding, of which the
            log-probability is -inf.
        temperature: Divides the logits: a positive number, or a tensor ``[...]`` of one for each token.
        renormalize: Whether the probabilities of a token's K classes add up to 1.
        mask: ``[...]``, bool: the tokens that are wanted; the others get 0 and cost nothing with lazy logits.
        chunk_bytes: Budget for one chunk of logits. By default the option of the model's head.

    Returns:
        Float32, or float64 for float64 logits.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`token_scores`.
    """
    logits, ids, mask = as_lazy(logits), _whole(ids), _whole(mask)
    check_logits("logits", logits)
    check_bool("renormalize", renormalize)
    check_integer("chunk_bytes", chunk_bytes, at_least=1, optional=True)
    check_same_device("logits", logits, ids=ids)
    if not isinstance(ids, Tensor) or ids.dim() == 0:
        raise wrong_type("ids", "a tensor of shape [..., K]", ids)
    tokens = logits.shape[:-1]
    check_shape("ids", ids, (*tokens, ids.shape[-1]), "one row for each token")
    check_labels("ids", ids.clamp(min=-1), logits.shape[-1], -1)
    check_tokens(mask, None, logits, tokens, "logits")
    check_temperature(temperature, ids.new_zeros(tokens), -1)
    lazy = _lazy(logits)
    if lazy is not None and lazy.head.shard is None and not isinstance(temperature, Tensor):
        options = {"temperature": temperature, "renormalize": renormalize, "mask": mask, "chunk_bytes": chunk_bytes}
        log_probs: Tensor = lazy.fused_loss(linear_topk_log_probs, ids, **options)
        return log_probs.to(_dtype(logits))

    def per_chunk(values: Tensor, ids: Tensor, *temperatures: Tensor) -> Tensor:
        z = _tempered(values, temperatures[0] if temperatures else temperature)
        is_padding = ids < 0
        id_logits = z.gather(-1, ids.clamp(min=0)).masked_fill(is_padding, -torch.inf)
        lse = (id_logits if renormalize else z).logsumexp(-1, keepdim=True)
        return (id_logits - lse).masked_fill(is_padding, -torch.inf)  # once more, as lse gets no gradient from it

    found = _over_chunks(per_chunk, logits, [ids, temperature], chunk_bytes).view(ids.shape)
    return found if mask is None else found.where(mask[..., None], 0.0)


def divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    kind: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    t_squared: bool = False,
    mask: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    vocab: str = "equal",
    chunk_bytes: int | None = None,
) -> Tensor:
    """A divergence of a student's predictions from a teacher's; only the student gets a gradient.

    Args:
        student_logits: ``[..., vocab_size]``, lazy or materialized.
        teacher_logits: As the student's, lazy or materialized, of the same tokens.
        kind: As for :func:`liger_ops.linear_divergence`, like the next five.
        beta: Of the kinds that have a parameter.
        temperature: Divides the logits of both models.
        t_squared: Whether the divergence is multiplied by ``temperature ** 2``.
        mask: ``[...]``, bool: the tokens that count.
        token_weight: ``[...]``: factors of the tokens' divergences.
        reduction: ``"mean"`` over the tokens that count, ``"sum"`` or ``"none"``.
        vocab: How vocabularies of different sizes are compared.
        chunk_bytes: Budget for one chunk of logits. By default the option of the student's head.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`token_scores`.
    """
    student_logits, teacher_logits = as_lazy(student_logits), as_lazy(teacher_logits)
    mask, token_weight = _whole(mask), _whole(token_weight)
    check_logits("student_logits", student_logits)
    check_logits("teacher_logits", teacher_logits)
    check_same_device("student_logits", student_logits, teacher_logits=teacher_logits)
    check_choice("reduction", reduction, REDUCTIONS)
    check_integer("chunk_bytes", chunk_bytes, at_least=1, optional=True)
    options: dict[str, Any] = {"kind": kind, "beta": beta, "temperature": temperature, "t_squared": t_squared}
    DivergenceOptions.checked(**options)
    tokens = student_logits.shape[:-1]
    if teacher_logits.shape[:-1] != tokens:
        raise wrong_value("teacher_logits", f"logits of the student's tokens {tuple(tokens)}", teacher_logits)
    check_tokens(mask, token_weight, student_logits, tokens, "student_logits")
    num_common_columns(student_logits.shape[-1], teacher_logits.shape[-1], vocab)
    student, teacher = _lazy(student_logits), _lazy(teacher_logits)
    if student is not None and teacher is not None and _fit_one_op(student, teacher, vocab, kind):
        options |= {"mask": mask, "token_weight": token_weight, "reduction": reduction, "chunk_bytes": chunk_bytes}
        return student.divergence(teacher, vocab=vocab, **options).to(_dtype(student, teacher))
    if not isinstance(student_logits, LazyLogits) and not isinstance(teacher_logits, LazyLogits):
        options |= {"mask": mask, "token_weight": token_weight, "reduction": reduction}
        return divergence_of_logits(_real(student_logits), _real(teacher_logits), vocab=vocab, **options)

    def per_chunk(student: Tensor, teacher: Tensor, *masks: Tensor) -> Tensor:
        kept = masks[0][:, 0] if masks else None
        return divergence_of_logits(student, teacher, **options, mask=kept, reduction="none", vocab=vocab)

    sources = [logit_rows(student_logits), logit_rows(teacher_logits.detach())]
    masks = [] if mask is None else [mask.reshape(-1, 1)]
    chunk_size = min(_chunk_size(student_logits, chunk_bytes), _chunk_size(teacher_logits, chunk_bytes))
    losses = over_chunks(per_chunk, sources, masks, chunk_size).view(tokens)
    weights = torch.ones_like(losses) if token_weight is None else token_weight.to(losses.dtype)
    weights = weights if mask is None else weights.where(mask, 0.0)
    losses, total = losses * weights, weights.sum()
    if reduction == "mean":
        return losses.sum() / total.where(total != 0, 1.0)
    return losses.sum() if reduction == "sum" else losses


def _fit_one_op(student: LazyLogits, teacher: LazyLogits, vocab: str, kind: str) -> bool:
    """Whether one op takes both heads: every rank has them whole, or the same classes of both."""
    if kind in ("mse", "cosine") and (student.transform.normalized or teacher.transform.normalized):
        return False  # ops do not know a log-softmax, which divergences of logits see
    shards = student.head.shard, teacher.head.shard
    return shards == (None, None) or (vocab == "equal" and shards[0] == shards[1])


def logit_rows(logits: Tensor) -> Rows:
    """Logits ``[..., vocab_size]``, lazy or materialized, as rows of tokens whose values are read in chunks."""
    lazy = _lazy(logits)
    if lazy is None:
        values = _real(logits)
        return Rows(values.reshape(-1, values.shape[-1]), lambda rows: rows, values.requires_grad)
    lazy.notice("a function of logits")
    return lazy.expression.rows()


def _checked(logits: Tensor, labels: Tensor, *given: Any) -> tuple[Tensor, dict[str, Any]]:
    """The labels and the options of :func:`token_scores`, names in the order of the scores; raises as that."""
    options: dict[str, Any] = dict(zip(_OPTIONS, given, strict=True))
    labels, temperature, ignore_index = _whole(labels), options["temperature"], options["ignore_index"]
    check_logits("logits", logits)
    check_same_device("logits", logits, labels=labels)
    check_shape("labels", labels, logits.shape[:-1], "that of the logits without the vocabulary")
    check_temperature(temperature, labels, ignore_index)
    check_integer("ignore_index", ignore_index)
    check_integer("saved_logits_bytes", options["saved_logits_bytes"], at_least=0, optional=True)
    check_integer("chunk_bytes", options["chunk_bytes"], at_least=1, optional=True)
    check_labels("labels", labels, logits.shape[-1], ignore_index)
    if isinstance(temperature, Tensor):  # may be anything at ignored tokens
        options["temperature"] = temperature.where(labels != ignore_index, 1.0)
    options["outputs"] = check_outputs("outputs", options["outputs"], OUTPUTS, at_least=1)
    options["detach"] = check_outputs("detach", options["detach"], DIFFERENTIABLE)
    return labels, options


def check_logits(name: str, logits: Tensor) -> None:
    """Raises unless these are logits whose vocabulary is the last dimension."""
    check_floating(name, logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise wrong_value(name, "of shape [..., vocab_size] with at least one class", logits)
    if isinstance(logits, LazyLogits) and logits.vocab_dim != -1:
        raise ValueError(
            f"{name} must have the vocabulary as their last dimension, got {shown(logits)} whose vocabulary is"
            f" dimension {logits.vocab_dim}; pass {name}.movedim({logits.vocab_dim}, -1)"
        )


def _lazy(logits: Tensor) -> LazyLogits | None:
    """The logits if they are lazy and their gradient need not pass another function."""
    return logits if isinstance(logits, LazyLogits) and not logits.is_foreign else None


def _fused(logits: Tensor, outputs: Sequence[str]) -> LazyLogits | None:
    """The logits if ops compute these scores of them: those that a log-softmax changes only where there is none."""
    lazy = _lazy(logits)
    sees_log_softmax = lazy is not None and lazy.transform.normalized and not {"lse", "mean_logit"}.isdisjoint(outputs)
    return None if sees_log_softmax else lazy


def _dtype(*logits: Tensor) -> torch.dtype:
    """That of scores. A float64 head's logits may have been cast."""
    return functools.reduce(torch.promote_types, (each.dtype for each in logits), torch.float32)


def _whole(value: Any) -> Any:
    """A tensor of tokens as every rank has it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _real(logits: Tensor) -> Tensor:
    if isinstance(logits, LazyLogits):
        logits = logits.real_values("token_scores")
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def _tempered(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Rows of logits in at least float32, divided by one temperature or one for each row, ``[num_rows, 1]``."""
    return logits.to(_dtype(logits)) / temperature


def _chunk_size(logits: Tensor, chunk_bytes: int | None) -> int:
    """The number of tokens in a chunk, by default as the option of the head says if the logits are lazy."""
    if chunk_bytes is None and (lazy := _lazy(logits)) is not None:
        chunk_bytes = lazy.head.options.get("chunk_bytes")
    sizes = math.prod(logits.shape[:-1]), logits.shape[-1], _dtype(logits).itemsize
    return choose_tokens(*sizes, chunk_bytes, logits.device)


def _scores_of_rows(logits: Tensor, labels: Tensor, options: dict[str, Any]) -> TokenScores:
    """:func:`token_scores` of logits of which chunks are read; ``saved_logits_bytes`` has no effect."""
    temperature, outputs = options["temperature"], options["outputs"]

    def per_chunk(values: Tensor, labels: Tensor, *temperatures: Tensor) -> tuple[Tensor, ...]:
        z = _tempered(values, temperatures[0] if temperatures else temperature)
        scores = scores_reference(z, labels[:, 0], options["ignore_index"], outputs)
        return tuple(score for score in scores if score is not None)

    found = _over_chunks(per_chunk, logits, [labels, temperature], options["chunk_bytes"])
    named = {name: score.view(labels.shape) for name, score in zip(outputs, found, strict=True)}
    return TokenScores(**{k: score.detach() if k in options["detach"] else score for k, score in named.items()})


def _over_chunks(
    function: Callable[..., Any], logits: Tensor, per_token: Sequence[Any], chunk_bytes: int | None
) -> Any:
    """``function`` of chunks of logits and of those of ``per_token`` that are tensors, ``[...]`` or ``[..., any]``."""
    num_tokens = math.prod(logits.shape[:-1])
    rows = [each.reshape(num_tokens, -1) for each in per_token if isinstance(each, Tensor)]
    return over_chunks(function, [logit_rows(logits)], rows, _chunk_size(logits, chunk_bytes))
