"""Scores of tokens: functions of each token's logits that post-training losses are made of.

With a the logits of a token, V of them, s ``logit_scale``, T ``temperature`` and y the label,

    z = softcap * tanh(s * a / softcap) / T     (z = s * a / T without softcap)
    lse = log(sum(exp(z)))                      p = exp(z - lse)
    log_prob = z[y] - lse                       d log_prob / dz = 1[y] - p
    entropy = lse - sum(p * z), in nats         d entropy / dz = -p * (z - lse + entropy)
    mean_logit = sum(z) / V                     d mean_logit / dz = 1 / V
                                                d lse / dz = p
    log_sum_sq_probs = log(sum(p**2)) = log(sum(exp(2 * z))) - 2 * lse

A temperature is a factor: it divides both ``logit_scale`` and ``softcap``. Arithmetic is float32 for half precision.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_ops.arguments import check_floating, check_number, check_same_device, check_shape, wrong_type, wrong_value
from liger_ops.loss.options import TokenLossOptions, check_constant


class TokenScores(NamedTuple):
    """Scores of tokens, in the labels' shape; None where not asked for, zero or False at ignored tokens.

    Float32, or float64 for float64 hidden states, if not said otherwise.
    """

    log_probs: Tensor | None = None
    """Log-probability of the label; differentiable, as are the next three."""
    entropy: Tensor | None = None
    """Entropy of the predicted distribution, in nats."""
    lse: Tensor | None = None
    """Log-sum-exp of the logits, scaled, soft-capped and divided by the temperature."""
    mean_logit: Tensor | None = None
    """Mean over the vocabulary of these logits."""
    predictions: Tensor | None = None
    """Int64: the class of the largest logit, the first of equals; ``ignore_index`` at ignored tokens."""
    correct: Tensor | None = None
    """Bool: whether the prediction is the label."""
    log_sum_sq_probs: Tensor | None = None
    """Logarithm of the sum of all squared probabilities."""


OUTPUTS = TokenScores._fields
DIFFERENTIABLE = OUTPUTS[:4]


def check_outputs(name: str, value: Any, allowed: Sequence[str], *, at_least: int = 0) -> tuple[str, ...]:
    """``value`` in the order of :class:`TokenScores`; raises unless it is a sequence of names that are allowed."""
    expected = f"a sequence of names out of {', '.join(map(repr, allowed))}"
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise wrong_type(name, expected, value)
    if len(value) < at_least or any(each not in allowed for each in value):
        raise wrong_value(name, expected, value)
    return tuple(each for each in OUTPUTS if each in value)


def check_temperature(temperature: Any, target: Tensor, ignore_index: int) -> None:
    """Raises unless it is a positive number, or a tensor of one for each token that needs no gradient.

    Values of a tensor are only looked at on a CPU; those of ignored tokens may be anything.
    """
    if not isinstance(temperature, Tensor):
        check_number("temperature", temperature, above=0)
        return
    check_floating("temperature", temperature)
    check_same_device("target", target, temperature=temperature)
    check_shape("temperature", temperature, target.shape, "one for each token")
    check_constant("temperature", temperature, "the scores have")
    if temperature.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = temperature[~(temperature > 0) & (target != ignore_index)]
        if wrong.numel():
            raise ValueError(f"temperature must be positive at each token, got {wrong[0].item()}")


def with_temperature(
    options: TokenLossOptions, temperature: Any, labels: Tensor, dtype: torch.dtype
) -> tuple[TokenLossOptions, Tensor | None]:
    """The options of tempered logits of ``dtype``, and the temperatures of single tokens, ``[num_tokens]``, or None."""
    temperatures = None
    if isinstance(temperature, Tensor):
        each = temperature.detach().reshape(-1).to(torch.promote_types(dtype, torch.float32))
        # Those of ignored tokens may be 0.
        temperatures, temperature = each.where(labels != options.ignore_index, 1.0), 1.0
    cap = None if options.softcap is None else options.softcap / temperature
    return options._replace(softcap=cap, logit_scale=options.logit_scale / temperature), temperatures


def scores_reference(z: Tensor, labels: Tensor, ignore_index: int, outputs: Sequence[str]) -> TokenScores:
    """Scores of rows of transformed logits ``[num_tokens, vocab_size]`` in plain PyTorch.

    NaN log-probabilities for labels that are no class.
    """
    kept = labels != ignore_index
    in_range = (labels >= 0) & (labels < z.shape[-1])
    log_probs = torch.log_softmax(z, dim=-1)
    found: dict[str, Tensor] = {}
    if "log_probs" in outputs:
        label_log_probs = log_probs.gather(-1, labels.where(in_range, 0)[:, None])[:, 0]
        found["log_probs"] = label_log_probs.where(in_range, torch.nan)
    if "entropy" in outputs:
        finite = log_probs.masked_fill(log_probs == -torch.inf, 0.0)
        found["entropy"] = -(log_probs.exp() * finite).sum(-1)
    if "lse" in outputs:
        found["lse"] = z.logsumexp(-1)
    if "mean_logit" in outputs:
        found["mean_logit"] = z.mean(-1)
    found = {name: score.where(kept, 0.0) for name, score in found.items()}
    predictions = z.argmax(-1)
    if "predictions" in outputs:
        found["predictions"] = predictions.where(kept, ignore_index)
    if "correct" in outputs:
        found["correct"] = kept & (predictions == labels)
    if "log_sum_sq_probs" in outputs:
        found["log_sum_sq_probs"] = (2 * log_probs.detach()).logsumexp(-1).where(kept, 0.0)
    return TokenScores(**found)
