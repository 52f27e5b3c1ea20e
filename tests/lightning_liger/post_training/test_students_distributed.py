"""Students and Medusa heads trained by two processes end with the weights of one process, under every engine."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.lightning_liger.post_training.workers.students import MODULES, STRATEGIES, batches_of, module_of
from tests.lightning_liger.strategies.workers.distributed import launch

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("students")
    return launch("cpu", folder, worker="tests.lightning_liger.post_training.workers.students")


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], tuple[dict[str, torch.Tensor], float]]:
    """The weights and the loss of one process that gets the batches of one rank, or of both, in one step."""
    found = {}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    for name in MODULES:
        for num_ranks in (1, 2):
            batches = [batch for rank in range(num_ranks) for batch in batches_of(rank)]
            module = module_of(name, "liger")
            trainer = L.Trainer(
                accelerator="cpu", devices=1, strategy="liger", max_epochs=1, accumulate_grad_batches=len(batches), **quiet
            )
            trainer.fit(module, DataLoader(batches, batch_size=None))
            state = {key: value.clone() for key, value in module.state_dict().items()}
            found[name, num_ranks] = state, float(trainer.callback_metrics["train_loss"])
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_train_as_one_process(
    ranks: list[dict[str, Any]], alone: dict[tuple[str, int], Any], strategy: str
) -> None:
    for name in MODULES:
        expected, loss = alone[name, 1 if strategy == "context_parallel" else 2]
        for rank in ranks:
            result = rank[f"{name}-{strategy}"]
            assert result["metrics"]["train_loss"] == pytest.approx(loss, rel=1e-4), name
            state = {key: value for key, value in result["state"].items() if "metric" not in key}
            assert state.keys() == {key for key in expected if "metric" not in key}, name  # no teacher
            for key, value in state.items():
                torch.testing.assert_close(
                    value, expected[key], rtol=1e-3, atol=2e-6, msg=lambda text, n=(name, key): f"{n}: {text}"
                )
