"""The scores and losses of a linear head's tokens in plain PyTorch, through materialized logits."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from liger_ops.log_probs.scores import TokenScores, scores_reference
from liger_ops.loss.cross_entropy import transform_logits
from liger_ops.loss.options import IGNORE_INDEX, TokenLossOptions

TokenLoss = Callable[[TokenScores, Tensor], Tensor]
"""From the scores of some tokens and their indices, ``[n]`` each, to their losses, ``[n]``."""


def linear_log_probs_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    adapter: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = IGNORE_INDEX,
    outputs: Sequence[str] = ("log_probs",),
    detach: Sequence[str] = (),
) -> TokenScores:
    """Materializes the logits; arguments as for :func:`~liger_ops.linear_log_probs`."""
    logits = F.linear(input, linear_weight, linear_bias)
    if adapter is not None:
        logits = logits + F.linear(*adapter)
    z = transform_logits(logits, TokenLossOptions(softcap=softcap, logit_scale=logit_scale))
    if isinstance(temperature, Tensor):
        temperature = temperature.to(z.dtype).where(target != ignore_index, 1.0)[..., None]
    z = z / temperature
    scores = scores_reference(z.flatten(0, -2), target.reshape(-1), ignore_index, outputs)._asdict()
    shaped = {name: score.view(target.shape) for name, score in scores.items() if score is not None}
    return TokenScores(**{name: score.detach() if name in detach else score for name, score in shaped.items()})


def linear_token_loss_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    token_loss: TokenLoss,
    *,
    units: object = None,
    ignore_index: int = IGNORE_INDEX,
    **options: object,
) -> tuple[Tensor, TokenScores]:
    """Materializes the logits; arguments as for :func:`~liger_ops.linear_token_loss`."""
    scores = linear_log_probs_reference(input, linear_weight, target, ignore_index=ignore_index, **options)  # type: ignore[arg-type]
    index = (target.reshape(-1) != ignore_index).nonzero()[:, 0]
    losses = token_loss(scores_at(scores, index), index)
    return losses.sum(), TokenScores(*(None if score is None else score.detach() for score in scores))


def scores_at(scores: TokenScores, index: Tensor) -> TokenScores:
    """The scores of the tokens of ``index``."""
    return TokenScores(*(None if score is None else score.reshape(-1)[index] for score in scores))
