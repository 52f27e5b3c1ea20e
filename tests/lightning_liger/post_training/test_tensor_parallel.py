"""Preference, policy and distillation modules train on two tensor-parallel ranks as in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning_liger.post_training.workers.tensor_parallel import RUNS, train
from tests.lightning_liger.strategies.workers.distributed import launch
from tests.lightning_liger.tiny import tiny_llama, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tensor_parallel")
    tiny_llama().save_pretrained(folder / "model")
    tiny_model("qwen2", hidden_size=48).save_pretrained(folder / "teacher")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return launch("cpu", folder, worker="tests.lightning_liger.post_training.workers.tensor_parallel")


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_as_one_process(ranks: list[dict[str, Any]], folder: Path, name: str) -> None:
    expected = train(name, "liger", folder)
    for rank in ranks:
        assert rank[name]["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-5, nan_ok=True)
        torch.testing.assert_close(rank[name]["model"], expected["model"], rtol=1e-3, atol=2e-5)
