"""Students and Medusa heads trained by two processes end with the weights of one process, under every engine."""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.lightning_liger.post_training.workers.students import RUNS, batches_of, module_of
from tests.lightning_liger.strategies.workers.distributed import launch
from tests.lightning_liger.tiny import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("students")
    tiny_llama().save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return launch("cpu", folder, worker="tests.lightning_liger.post_training.workers.students")


@functools.cache
def alone(name: str, num_ranks: int, folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    """The weights and the loss of one process that gets the batches of one rank, or of both, in one step."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    batches = [batch for rank in range(num_ranks) for batch in batches_of(rank)]
    module, options = module_of(name, "liger", folder), {"max_epochs": 1, "accumulate_grad_batches": len(batches)}
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy="liger", **options, **quiet)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.state_dict(), float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize("strategy", RUNS)
def test_two_ranks_train_as_one_process(ranks: list[dict[str, Any]], folder: Path, strategy: str) -> None:
    for name in RUNS[strategy]:
        expected, loss = alone(name, 1 if strategy == "context_parallel" else 2, folder)
        for rank in ranks:
            result = rank[f"{name}-{strategy}"]
            assert result["metrics"]["train_loss"] == pytest.approx(loss, rel=1e-4), name
            state = {key: value for key, value in result["state"].items() if "metric" not in key}
            assert state.keys() == {key for key in expected if "metric" not in key}, name  # no teacher
            for key, value in state.items():
                torch.testing.assert_close(
                    value, expected[key], rtol=1e-3, atol=2e-6, msg=lambda text, n=(name, key): f"{n}: {text}"
                )
