"""This project's ops."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops
from benchmarks.losses import eager
from benchmarks.losses.data import Data
from benchmarks.losses.formulas import DPO_BETA, clipped_token_loss
from liger_ops import TokenScores

BUDGET_GIB = 2.5
BUDGET = int(BUDGET_GIB * 2**30)
"""Bytes of logits that are kept for the backward pass in the contender that has a budget."""


def log_probs(hidden_states: Tensor, weight: Tensor, labels: Tensor, saved_logits_bytes: int = 0) -> Tensor:
    scores = liger_ops.linear_log_probs(hidden_states, weight, labels, saved_logits_bytes=saved_logits_bytes)
    return scores.log_probs


log_probs_within_budget = functools.partial(log_probs, saved_logits_bytes=BUDGET)


def weighted_sum_in_loop(data: Data) -> Tensor:
    loss, _ = liger_ops.linear_token_loss(
        data.hidden_states,
        data.weight,
        data.labels,
        lambda scores, indices: -scores.log_probs * data.coefficients[indices],
    )
    return loss


def grpo_in_loop(data: Data) -> Tensor:
    advantages = data.advantages.repeat_interleave(data.sizes.seq_len)
    loss, _ = liger_ops.linear_token_loss(
        data.hidden_states,
        data.weight,
        data.labels,
        lambda scores, indices: clipped_token_loss(scores.log_probs, data.old_log_probs[indices], advantages[indices]),
    )
    return loss / data.sizes.num_tokens


def dpo_in_loop(data: Data) -> Tensor:
    """Pairs in the loop: the two sequences of a pair are in one chunk."""
    sizes = data.sizes
    num_pairs = sizes.num_sequences // 2
    with torch.no_grad():
        reference = log_probs(data.other_hidden_states, data.other_weight, data.labels)
    sequences = torch.arange(sizes.num_sequences, device=reference.device).repeat_interleave(sizes.seq_len)

    def loss(scores: TokenScores, indices: Tensor) -> Tensor:
        ratios = torch.zeros(sizes.num_sequences, device=indices.device)
        ratios = ratios.index_add(0, sequences[indices], scores.log_probs - reference[indices])
        chosen, rejected = ratios.chunk(2)
        is_first = indices % sizes.seq_len == 0  # a pair's loss is that of its first token
        pairs = sequences[indices]
        losses = -F.logsigmoid(DPO_BETA * (chosen - rejected))
        return losses[pairs % num_pairs].where(is_first & (pairs < num_pairs), 0.0)

    total, _ = liger_ops.linear_token_loss(
        data.hidden_states, data.weight, data.labels, loss, units=sequences % num_pairs
    )
    return total / num_pairs


def with_entropy(data: Data) -> Tensor:
    scores = liger_ops.linear_log_probs(data.hidden_states, data.weight, data.labels, outputs=("log_probs", "entropy"))
    return -(data.coefficients * (scores.log_probs + scores.entropy)).sum()


def topk(data: Data, renormalize: bool) -> Tensor:
    found = liger_ops.linear_topk_log_probs(data.hidden_states, data.weight, data.ids, renormalize=renormalize)
    return -(data.id_coefficients * found).sum()


def divergence(data: Data, kind: str) -> Tensor:
    return liger_ops.linear_divergence(
        data.hidden_states,
        data.weight,
        data.other_hidden_states,
        data.other_weight,
        kind=kind,
        beta=eager.beta_of(kind),
    )
