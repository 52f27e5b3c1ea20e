"""Rows of sequences: which tokens are labels, and how many are no padding."""

import torch
from torch import Tensor

from lightning_liger.post_training.rows import Rows, read_rows, read_tokens
from lightning_liger.training.language_model import LanguageModel
from tests.lightning_liger.tiny import tiny_llama

IDS = [[7, 8, 9], [4, 5, 6, 3, 2]]


def padded(is_left: bool) -> dict[str, Tensor]:
    """Two rows whose completions start with the first token; a mask that is not 0 at padding either."""
    batch = {"input_ids": torch.zeros(2, 5, dtype=torch.int64), "attention_mask": torch.zeros(2, 5, dtype=torch.int64)}
    for row, ids in enumerate(IDS):
        place = slice(5 - len(ids), None) if is_left else slice(len(ids))
        batch["input_ids"][row, place] = torch.tensor(ids)
        batch["attention_mask"][row, place] = 1
    return batch | {"completion_mask": torch.ones(2, 5, dtype=torch.int64)}


def test_padding_is_no_label_and_predicts_none_on_either_side() -> None:
    model = LanguageModel(tiny_llama())
    for is_left in (False, True):
        batch = padded(is_left)
        rows = read_rows(batch)
        assert [row[row >= 0].tolist() for row in rows.labels] == [ids[1:] for ids in IDS]
        assert torch.equal(read_tokens("train", batch, model).labels, rows.labels)
        assert rows.num_tokens == 8


def test_tokens_are_counted_by_masks_of_tokens_or_by_sequences() -> None:
    labels, ids = torch.zeros(1, 5, dtype=torch.int64), torch.tensor([[0, 0, 1, 1, -1]])
    # Of numbers of documents, of which 0 is padding; by sequences where the mask has another shape, or there is none.
    assert Rows({"attention_mask": ids + 1}, labels).num_tokens == 4
    assert Rows({"attention_mask": torch.full((1, 1, 5, 5), -1e9)}, labels, ids).num_tokens == 4
    assert Rows({}, labels.expand(2, 5), ids).num_tokens == 8
    assert Rows({}, labels).num_tokens == 5
