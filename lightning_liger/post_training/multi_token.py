"""Several predictions through one LM head, for one gradient of its weight."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from liger_ops import TokenScores
from liger_ops.arguments import check_number, wrong_type, wrong_value
from lightning_liger.lazy.scores import token_loss


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
    factors, num_tokens = torch.tensor(weights, device=targets.device), targets[0].numel()

    def weighted(scores: TokenScores, index: Tensor) -> Tensor:
        log_probs = cast(Tensor, scores.log_probs)
        return -factors.to(log_probs.dtype)[index // num_tokens] * log_probs

    return token_loss(logits, targets, weighted, outputs=("log_probs", "correct"))
