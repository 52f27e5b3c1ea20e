"""Log-probabilities of several given classes of each token, of a linear head without materialized logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops.arguments import check_bool, check_floating, check_integer, check_number, check_same_device, wrong_value
from liger_ops.loss.linear_head import check_head
from liger_ops.loss.vocab_parallel import VocabShard


def linear_topk_log_probs_reference(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    adapter: tuple[Tensor, Tensor] | None = None,
    renormalize: bool = False,
    mask: Tensor | None = None,
    with_lse: bool = False,
) -> Any:
    """:func:`linear_topk_log_probs` from whole logits in plain PyTorch, which autograd differentiates."""
    logits = F.linear(input, linear_weight, linear_bias)
    if adapter is not None:
        logits = logits + F.linear(*adapter)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    is_id = ids >= 0
    chosen = z.gather(-1, ids.clamp(min=0)).masked_fill(~is_id, -torch.inf)
    lse = (chosen if renormalize else z).logsumexp(-1)
    log_probs = (chosen - lse[..., None]).masked_fill(~is_id, -torch.inf)
    if mask is not None:
        log_probs, lse = log_probs.where(mask[..., None], 0.0), lse.where(mask, 0.0)
    return (log_probs, lse) if with_lse else log_probs


def linear_topk_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    adapter: tuple[Tensor, Tensor] | None = None,
    vocab_shard: VocabShard | None = None,
    renormalize: bool = False,
    mask: Tensor | None = None,
    with_lse: bool = False,
    chunk_bytes: int | None = None,
    saved_logits_bytes: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities of given classes, differentiable; sparse distillation is made of them.

    Args:
        input: Hidden states, ``[..., hidden_size]``.
        linear_weight: The head, ``[vocab_size, hidden_size]``.
        ids: Classes of each token, int64, ``[..., K]``. A class may occur more than once. Negative ids are padding of
            supports of different sizes: their log-probability is -inf, and they have no gradient.
        linear_bias: The head's bias, ``[vocab_size]``.
        temperature: Divides the logits.
        softcap: Logits become ``softcap * tanh(logits / softcap)``, after scaling. None leaves them.
        logit_scale: Factor of the logits.
        adapter: A low-rank update of the logits, as :func:`~liger_ops.linear_cross_entropy` takes it.
        vocab_shard: Not supported; must be None.
        renormalize: Whether probabilities are those among the K classes, which needs no other class's logit.
        mask: bool, ``[...]``: True at tokens that are scored; the others are 0 and cost nothing.
        with_lse: Whether to also return the log-sum-exp of the tempered logits, ``[...]``, differentiable.
        chunk_bytes: Budget for one chunk of logits.
        saved_logits_bytes: Budget for logits that are kept for backward.

    Returns:
        ``[..., K]``, at least float32; with ``with_lse`` a pair.

    Raises:
        TypeError: For arguments of another type.
        ValueError: For shapes, dtypes, devices or options that do not fit; for ids that are no classes if they are on
            the CPU (on the GPU their log-probabilities are NaN).
    """
    check_floating("input", input)
    check_floating("linear_weight", linear_weight)
    return linear_topk_log_probs_reference(
        input, linear_weight, ids, linear_bias=linear_bias, temperature=temperature, softcap=softcap,
        logit_scale=logit_scale, adapter=adapter, renormalize=renormalize, mask=mask, with_lse=with_lse,
    )  # fmt: skip
