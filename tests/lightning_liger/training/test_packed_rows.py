"""Documents in packed rows are kept apart, with an attention mask too: the loss is that of separate rows."""

import copy
import random
from itertools import chain

import pytest
import torch
from torch import Tensor

from lightning_liger.training.language_model import LanguageModel
from tests.lightning_liger.architectures import tiny_causal_lm
from tests.lightning_liger.post_training.training import LM


def random_rows(seed: int, vocab_size: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """A batch of packed rows with random padding, and its documents."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    parts, length = [], rng.choice([9, 16])
    gaps = rng.choice([0, 0, 3])  # padding after each document, or at the end only
    num_rows = rng.choice([1, 2, 3])
    for _ in range(num_rows):
        at_end = rng.choice([0, 1, 4])
        left = length - at_end
        while left > 0:
            document = torch.randint(vocab_size, (min(left, rng.randint(1, 7)),))
            padding = min(rng.randint(0, gaps), left - len(document))
            left -= len(document) + padding
            parts.append((document, padding if left else padding + at_end))
    documents = [document for document, _ in parts]
    columns = {
        "input_ids": [[*each.tolist(), *[rng.randrange(vocab_size)] * n] for each, n in parts],
        "labels": [[*each.tolist(), *[-100] * n] for each, n in parts],
        "attention_mask": [[1] * len(each) + [0] * n for each, n in parts],
        "position_ids": [range(len(each) + n) for each, n in parts],
    }
    found = {key: torch.tensor([*chain(*column)]).view(num_rows, length) for key, column in columns.items()}
    if found["attention_mask"].all() and rng.random() < 0.5:
        found["attention_mask"] = found["attention_mask"].float()
    return found, documents


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "gemma3_text"])
def test_loss_and_gradients_are_those_of_separate_rows(architecture: str) -> None:
    model = tiny_causal_lm(architecture)
    for seed in range(15):
        batch, documents = random_rows(seed, model.config.vocab_size)
        packed, separate = LM(model), LM(copy.deepcopy(model))
        packed.zero_grad()
        kept = batch | {"attention_mask": batch["attention_mask"].clone()}
        loss = packed.training_step(batch, 0)
        loss.backward()
        assert all(torch.equal(batch[key], kept[key]) for key in kept)
        parts = [
            separate.training_step({"input_ids": each[None], "labels": each[None]}, 0) * (len(each) - 1)
            for each in documents
            if len(each) > 1
        ]
        if not parts:
            continue
        want = torch.stack(parts).sum() / sum(len(each) - 1 for each in documents)
        want.backward()
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=0, msg=lambda text, seed=seed: f"{seed}: {text}")
        for own, other in zip(packed.parameters(), separate.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4], [1, 1, 0, 1, 2]], ids=["counted", "of tokens"])
def test_mask_of_padding_on_the_left_stays(positions: list[int]) -> None:
    model = LM(tiny_causal_lm("llama"))
    ids, position_ids = torch.arange(5)[None] + 3, torch.tensor([positions])
    padded = {"input_ids": ids, "position_ids": position_ids, "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])}
    labels = ids.masked_fill(torch.arange(5) < 3, -100)  # no token is predicted from padding
    alone = {"input_ids": ids[:, 2:], "position_ids": position_ids[:, 2:], "labels": ids[:, 2:]}
    torch.testing.assert_close(model.training_step(padded | {"labels": labels}, 0), model.training_step(alone, 0))


@pytest.mark.parametrize("architecture", ["gpt_oss", "opt", "mamba2", "bamba", "lfm2", "minimax"])
def test_architecture_that_does_not_look_for_documents_is_refused(architecture: str) -> None:
    model = LanguageModel(tiny_causal_lm(architecture))
    ids = torch.arange(3, 9)[None]
    model({"input_ids": ids, "position_ids": torch.arange(6)[None]}, ids)
    packed = {"input_ids": ids, "position_ids": torch.arange(6)[None] % 4}
    for more in ({}, {"attention_mask": torch.ones_like(ids)}):
        with pytest.raises(ValueError, match=r"batch\['position_ids'\] must not restart within a row"):
            model(packed | more, ids)
