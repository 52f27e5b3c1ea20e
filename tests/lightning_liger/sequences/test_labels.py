"""Packed documents train like documents in separate rows, and shifted labels like unshifted ones."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_liger import apply_liger_kernels, shift_labels, split_sequence
from tests.lightning_liger.post_training.training import LM
from tests.lightning_liger.tiny import VOCAB_SIZE, tiny_model

Batch = dict[str, Tensor]

PAGE = (Path(__file__).parents[3] / "docs" / "sequences.md").read_text(encoding="utf-8")
PAGE_BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)

DOCUMENTS = [torch.arange(3, 10), torch.tensor([40]), torch.arange(20, 16, -1), torch.arange(60, 72, 2)]
"""Of a row: one of a single token, which predicts nothing."""


def packed(num_rows: int = 1) -> Batch:
    """All documents in each row, in another order in the second."""
    rows = [DOCUMENTS, DOCUMENTS[::-1]][:num_rows]
    input_ids = torch.stack([torch.cat(row) for row in rows])
    position_ids = torch.stack([torch.cat([torch.arange(len(document)) for document in row]) for row in rows])
    return {"input_ids": input_ids, "labels": input_ids, "position_ids": position_ids}


# Packing


# Gemma 2 caps its logits, in attention and in the loss, and its windows are shorter than documents.
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_packed_documents_train_as_in_rows_of_their_own(architecture: str) -> None:
    windows = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    whole, stock = (tiny_model(architecture, **windows if architecture == "gemma2" else {}) for _ in range(2))
    assert apply_liger_kernels(whole).num_replaced > 5
    loss = LM(whole).training_step(packed(2), 0)
    loss.backward()
    assert (whole.lm_head.fusion_counters.num_losses, whole.lm_head.fusion_counters.num_materialized) == (1, 0)
    parts = [stock(ids[None], labels=ids[None]).loss * (len(ids) - 1) for ids in DOCUMENTS if len(ids) > 1]
    wanted = torch.stack(parts).sum() / sum(len(ids) - 1 for ids in DOCUMENTS)
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0.0)
    gradients, expected = ([parameter.grad for parameter in model.parameters()] for model in (whole, stock))
    largest = max(gradient.abs().max().item() for gradient in expected)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5 * largest)


def test_positions_of_images_and_text_say_nothing_about_documents() -> None:
    class OfThreeAxes(nn.Module):
        """Takes positions as models of images do."""

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
            assert position_ids.shape == (3, *input_ids.shape)
            return type("Output", (), {"logits": torch.zeros(*input_ids.shape, VOCAB_SIZE)})

    module, batch = LM(OfThreeAxes()), packed()
    logged: dict[str, Any] = {}
    module.log = lambda name, value, **_: logged.update({name: value})  # type: ignore[method-assign]
    module.validation_step({**batch, "position_ids": batch["position_ids"].expand(3, -1, -1)}, 0)
    assert logged["val_loss"].parts[1].item() == sum(map(len, DOCUMENTS)) - 1


def test_several_packed_rows_are_refused_under_flash_attention_which_would_join_their_documents() -> None:
    module = LM(tiny_model("llama"))
    module.model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"'flash_attention_2' separates packed documents only in a batch of one row"):
        module.validation_step(packed(2), 0)


# Shifted labels


def test_shift_labels_gives_each_token_the_next_of_its_document() -> None:
    labels = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, -100, 11, 12]])
    assert shift_labels(labels).tolist() == [[2, 3, 4, 5, 6, -100], [8, 9, -100, 11, 12, -100]]
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [4, 5, 6, 7, 0, 1]])
    expected = [[2, 3, -100, -100, 6, -100], [8, 9, -100, -100, 12, -100]]
    assert shift_labels(labels, positions).tolist() == expected
    assert shift_labels(labels, positions[:1]).tolist()[0] == expected[0]
    assert shift_labels(labels[0], positions[0]).tolist() == expected[0]
    assert labels[0].tolist() == [1, 2, 3, 4, 5, 6]


def test_code_of_the_page_on_sequences_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    shifting, trainer, _ = PAGE_BLOCKS  # the last runs on several ranks, in strategies/parts/test_shared_sequences.py
    exec(shifting, {})
    scope: dict[str, Any] = {}
    monkeypatch.setattr(L, "Trainer", lambda **options: options)  # this may be a machine with one device
    exec(trainer, scope)
    assert scope["trainer"]["strategy"].context_parallel_size == 2


# Pieces of rows


@settings(derandomize=True, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.sampled_from([torch.int64, torch.int32]))
def test_pieces_together_are_the_rows(
    data: st.DataObject, num_rows: int, size: int, length: int, dtype: torch.dtype
) -> None:
    shape = (num_rows, size * length)
    numbers = st.lists(st.integers(0, 3), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    keys = data.draw(st.sets(st.sampled_from(["labels", "position_ids", "seq_idx"])))
    batch = {key: torch.tensor(data.draw(numbers), dtype=dtype).view(shape) for key in ("input_ids", *keys)}
    before = {key: value.clone() for key, value in batch.items()}
    pieces = [split_sequence(batch, rank, size) for rank in range(size)]
    whole = {key: torch.cat([piece[key] for piece in pieces], dim=1) for key in pieces[0]}
    expected = {"position_ids": torch.arange(shape[1])[None], **batch}
    if "labels" in expected:
        expected["shift_labels"] = shift_labels(expected.pop("labels"), batch.get("position_ids"))
    torch.testing.assert_close(whole, expected, rtol=0.0, atol=0.0)
    torch.testing.assert_close(batch, before, rtol=0.0, atol=0.0)
    assert all(value.is_contiguous() for value in pieces[-1].values())


def test_piece_has_the_positions_of_the_row_and_what_is_given_as_it_is() -> None:
    lengths = torch.tensor([0, 4, 8], dtype=torch.int32)
    states, labels = torch.randn(2, 8, 5), torch.arange(16).view(2, 8)
    batch = {"input_ids": None, "inputs_embeds": states, "shift_labels": labels, "cu_seq_lens_q": lengths}
    piece = split_sequence(batch | {"max_length_q": 4}, 1, 2)
    assert piece.keys() == {"inputs_embeds", "shift_labels", "cu_seq_lens_q", "max_length_q", "position_ids"}
    assert piece["inputs_embeds"].equal(states[:, 4:])
    assert piece["shift_labels"].tolist() == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert piece["position_ids"].tolist() == [[4, 5, 6, 7]]
    assert piece["cu_seq_lens_q"] is lengths
