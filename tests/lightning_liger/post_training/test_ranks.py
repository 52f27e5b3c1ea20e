"""Two ranks with unequal micro-batches train preference losses as one process does, under each strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning_liger.post_training.preference_data import sequences
from tests.lightning_liger.post_training.test_preference import dpo_and_sft, trained
from tests.lightning_liger.post_training.workers.preference import NAMES, SIZES
from tests.lightning_liger.strategies.workers.distributed import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("preference")
    worker = "tests.lightning_liger.post_training.workers.preference"
    return launch("cpu", folder, worker=worker, num_ranks=2, environment_of=lambda _: {"DS_ACCELERATOR": "cpu"})


def examples_of(ranks: list[int], number: int = 2) -> list[list[tuple[torch.Tensor, int]]]:
    """The pairs of the first micro-batches of ranks."""
    examples = []
    for rank in ranks:
        for index, size in enumerate(SIZES[rank][:number]):
            items = sequences(2 * size, seed=10 * rank + index)
            examples += [[items[number], items[size + number]] for number in range(size)]
    return examples


@pytest.mark.parametrize("name", NAMES)
def test_loss_of_pairs_and_tokens_is_that_of_the_whole_step(ranks: list[dict[str, Any]], name: str) -> None:
    examples = examples_of([0] if name == "context_parallel" else [0, 1], 1 if name == "ddp_one_batch" else 2)
    model, loss = trained(lambda model: dpo_and_sft(model, examples))
    for result in ranks:
        assert result[name]["loss"] == pytest.approx(loss, rel=1e-5)
        assert result[name]["metrics"]["train_loss"] == pytest.approx(loss, rel=1e-5)
        state = result[name]["state"]
        assert not any("ref_model" in key for key in state)
        if name == "deepspeed":  # whose checkpoints are folders
            continue
        for key, want in model.named_parameters():
            torch.testing.assert_close(state[f"model.{key}"], want.detach(), rtol=1e-5, atol=1e-6)
