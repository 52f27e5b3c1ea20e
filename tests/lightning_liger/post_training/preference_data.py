"""Batches of preference data, and losses of whole steps written as loops over sequences of the stock model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.lightning_liger.plain_scores import scores_of
from tests.lightning_liger.tiny import VOCAB_SIZE, tiny_llama

Sequences = list[tuple[Tensor, int]]
"""Token ids of each sequence, with the number of those that are the prompt."""


def sequences(number: int, seed: int = 0) -> Sequences:
    """Of 4 to 12 tokens, of which 1 to 3 are the prompt."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    return [(torch.randint(3, VOCAB_SIZE, (draw(4, 13),), generator=generator), draw(1, 4)) for _ in range(number)]


def padded(items: Sequences, width: int = 0, prefix: str = "") -> dict[str, Tensor]:
    width = max(width, *(len(ids) for ids, _ in items))
    batch = {key: torch.zeros(len(items), width, dtype=torch.int64) for key in KEYS}
    for row, (ids, prompt) in enumerate(items):
        batch["input_ids"][row, : len(ids)] = ids
        batch["attention_mask"][row, : len(ids)] = 1
        batch["completion_mask"][row, prompt : len(ids)] = 1
    return {prefix + key: value for key, value in batch.items()}


def packed(items: Sequences, padding: int = 0) -> dict[str, Tensor]:
    """One row; its padding belongs to the last sequence."""
    columns = {
        "input_ids": [ids for ids, _ in items],
        "completion_mask": [(torch.arange(len(ids)) >= prompt).long() for ids, prompt in items],
        "position_ids": [torch.arange(len(ids)) for ids, _ in items],
        "sequence_ids": [torch.full_like(ids, index) for index, (ids, _) in enumerate(items)],
    }
    ends = {key: torch.zeros(padding, dtype=torch.int64) for key in columns}
    ends["sequence_ids"] += len(items) - 1
    return {key: torch.cat((*rows, ends[key]))[None] for key, rows in columns.items()}


KEYS = ("input_ids", "attention_mask", "completion_mask")


def token_log_probs(model: nn.Module, item: tuple[Tensor, int]) -> Tensor:
    """Of each completion token of one sequence."""
    ids, prompt = item
    return scores_of(model(input_ids=ids[None]).logits[0, :-1].float(), ids[1:])[prompt - 1 :]


def other_llama() -> nn.Module:
    """A frozen model with other weights than ``tiny_llama``."""
    model = tiny_llama()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model.requires_grad_(False).eval()


def sums(model: nn.Module, items: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Summed log-probabilities of completions."""
    return torch.stack([token_log_probs(model, item).sum() for item in items])
