"""What several files of tests share: one start of processes, and strategies out of a yaml."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from lightning_liger.cli import LigerCLI
from tests.lightning_liger.strategies.workers.distributed import launch


class EngineRuns(NamedTuple):
    """What ``engines.py`` saved on each rank, and where it wrote to."""

    device: str
    folder: Path
    ranks: list[dict[str, Any]]

    def of(self, name: str) -> list[dict[str, Any]]:
        """The run of that name on each rank."""
        return [results[name] for results in self.ranks]


@pytest.fixture(scope="session")
def started_engines() -> dict[str, EngineRuns]:
    """By device, those that ran already."""
    return {}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def engine_runs(request, tmp_path_factory, started_engines) -> EngineRuns:
    device = request.param
    if device not in started_engines:
        folder = tmp_path_factory.mktemp("engines")
        ranks = launch(device, folder, worker="tests.lightning_liger.strategies.workers.engines")
        started_engines[device] = EngineRuns(device, folder, ranks)
    return started_engines[device]


@pytest.fixture
def made_by_yaml(tmp_path, monkeypatch) -> Callable[[dict[str, Any]], Any]:
    """The strategy that the command line makes of its part of a yaml."""
    monkeypatch.setattr("sys.argv", ["lightning-liger"])

    def make(strategy: dict[str, Any]) -> Any:
        config = {
            "trainer": {"strategy": strategy, "accelerator": "cpu", "devices": 1, "logger": False},
            "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
            "data": {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return LigerCLI(args=[f"--config={tmp_path / 'config.yaml'}"], run=False).trainer.strategy

    return make
