"""Losses of several heads that predict tokens further ahead: Medusa and multi-token prediction.

``L = [next token] + coefficient * sum_k w_k CE_k``. Head k of Medusa (1, 2, ...) predicts token t + k + 1 from the
hidden state of token t, the k-th depth of multi-token prediction as well; a head with k = 0 predicts the next token.

All sums over tokens are divided by one number, that of the tokens with a next token to predict, so that no weight
depends on how a batch is split (DeepSeek-V3, arXiv:2412.19437, equation 24, divides by T at each depth too).
"""

import math
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from liger_ops import IGNORE_INDEX
from liger_ops.arguments import check_choice, check_integer, check_number, check_shape, check_tensor, wrong_type

Schedule = Literal["constant", "linear", "sine"]


def medusa_weights(num_heads: int, decay: float = 0.8) -> list[float]:
    """Weights of Medusa's heads, ``decay ** k`` for k from 1 (arXiv:2401.10774, section 2.2.1)."""
    check_integer("num_heads", num_heads, at_least=1)
    check_number("decay", decay, above=0)
    return [decay**k for k in range(1, num_heads + 1)]


def multi_token_weights(num_heads: int, weight: float = 1.0) -> list[float]:
    """Equal weights of ``num_heads`` further heads that share one unembedding (arXiv:2404.19737, equation 2)."""
    check_integer("num_heads", num_heads, at_least=1)
    check_number("weight", weight, at_least=0)
    return [weight] * num_heads


def deepseek_mtp_weights(num_depths: int, weight: float = 0.3) -> list[float]:
    """Weights ``weight / D`` of DeepSeek-V3's D depths (arXiv:2412.19437, equation 25).

    There ``weight`` is 0.3 for the first 10T tokens of training and 0.1 afterward.
    """
    check_integer("num_depths", num_depths, at_least=1)
    check_number("weight", weight, at_least=0)
    return [weight / num_depths] * num_depths


def scheduled_coefficient(
    step: int, num_steps: int | None, coefficient: float = 0.2, schedule: str = "constant"
) -> float:
    """The coefficient of all Medusa heads in joint training, lambda_0 of arXiv:2401.10774, section 2.2.2.

    It rises to ``coefficient`` in ``num_steps``, unless it is ``"constant"``; ``"sine"`` is
    ``sin(pi / 2 * step / num_steps)``.
    """
    check_integer("step", step, at_least=0)
    check_number("coefficient", coefficient, at_least=0)
    check_choice("schedule", schedule, get_args(Schedule))
    if schedule == "constant":
        return coefficient
    check_integer("num_steps", num_steps, at_least=1)
    progress = min(1.0, step / (num_steps or 1))
    return coefficient * (progress if schedule == "linear" else math.sin(math.pi / 2 * progress))


def targets_ahead(targets: Tensor, num_ahead: int, position_ids: Tensor | None = None) -> Tensor:
    """The targets of the head that predicts ``num_ahead`` tokens after the next one.

    Args:
        targets: ``[..., seq_len]``, the next token of each token, -100 to ignore it.
        num_ahead: k, 0 for ``targets`` themselves.
        position_ids: For rows of several documents, the position of each token in its document: ``[..., seq_len]``.

    Returns:
        ``[..., seq_len]``: the target of the token ``num_ahead`` later, -100 where that is in no or another document.
    """
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        raise wrong_type("targets", "a tensor of class indices", targets)
    check_integer("num_ahead", num_ahead, at_least=0)
    if not num_ahead:
        return targets
    padding = (0, min(num_ahead, targets.shape[-1]))
    later = F.pad(targets[..., num_ahead:], padding, value=IGNORE_INDEX)
    if position_ids is None:
        return later
    check_tensor("position_ids", position_ids)
    check_shape("position_ids", position_ids, (*position_ids.shape[:-1], targets.shape[-1]), "one for each token")
    distance = position_ids[..., num_ahead:] - position_ids[..., :-num_ahead]
    return later.masked_fill(F.pad(distance != num_ahead, padding, value=True), IGNORE_INDEX)
