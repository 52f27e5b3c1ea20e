"""Tokens of a text in two vocabularies, and their distance by sorted probabilities."""

import torch
from torch import Tensor

from liger_ops.loss.chunked_loss import choose_chunk_size
from lightning_liger.lazy.chunks import over_chunks
from lightning_liger.lazy.scores import logit_rows
from lightning_liger.losses.uld import ULDOptions, universal_logit_divergence

_CHUNK_BYTES = 2**29
_BYTES_OF_LOGIT = 16
"""Of the probabilities, their sorted copy and their order."""


def aligned_tokens(student_mask: Tensor, teacher_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that are compared: of each row, the i-th token of one mask with the i-th of the other.

    Args:
        student_mask: ``[batch_size, student_seq_len]``, bool.
        teacher_mask: ``[batch_size, teacher_seq_len]``, bool.

    Returns:
        Both masks with the same number of tokens in each row: the first ones.
    """
    number = torch.minimum(student_mask.sum(-1), teacher_mask.sum(-1))[:, None]
    first, second = (mask & (mask.cumsum(-1) <= number) for mask in (student_mask, teacher_mask))
    return first, second


def universal_logit_loss(student_logits: Tensor, teacher_logits: Tensor, options: ULDOptions) -> Tensor:
    """:func:`~lightning_liger.losses.uld.universal_logit_divergence` of chunks of tokens.

    Args:
        student_logits: ``[num_tokens, student_vocab_size]``, lazy or materialized.
        teacher_logits: ``[num_tokens, teacher_vocab_size]``, lazy or materialized.
        options: As for the function of one chunk.

    Returns:
        ``[num_tokens]``.
    """

    def of_chunk(student: Tensor, teacher: Tensor) -> Tensor:
        return universal_logit_divergence(student, teacher, options)

    size = student_logits.shape[-1] + teacher_logits.shape[-1]
    chunk_size = choose_chunk_size(len(student_logits), size, _BYTES_OF_LOGIT, _CHUNK_BYTES)
    sources = [logit_rows(student_logits), logit_rows(teacher_logits.detach())]
    losses: Tensor = over_chunks(of_chunk, sources, [], chunk_size)
    return losses
