"""What several ranks got out of the trainings of a file of tests, and strategies out of a yaml."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import yaml

from lightning_liger.cli import LigerCLI
from tests.lightning_liger.strategies.workers.distributed import NUM_RANKS, launch


class Ranks(NamedTuple):
    """The device, what each rank got out of every run, and the folder that they read and write."""

    device: str
    results: list[dict[str, Any]]
    folder: Any

    def of(self, name: str) -> list[dict[str, Any]]:
        return [result[name] for result in self.results]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request, tmp_path_factory) -> Ranks:
    """Of the file of the test: its ``results`` on ``NUM_PROCESSES`` of each device, after ``prepare(folder)``."""
    folder = tmp_path_factory.mktemp("ranks")
    getattr(request.module, "prepare", lambda folder: None)(folder)
    num_ranks = getattr(request.module, "NUM_PROCESSES", {}).get(request.param, NUM_RANKS)
    return Ranks(request.param, launch(request.param, folder, request.module.__name__, num_ranks=num_ranks), folder)


@pytest.fixture
def one_process(request, tmp_path) -> dict[str, Any]:
    """A run of one rank, on the ``device`` that the test has as a parameter, or on the CPU."""
    device = request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"
    accelerator = "gpu" if device == "cuda" else device
    return {"rank": 0, "size": 1, "folder": tmp_path, "device": device, "accelerator": accelerator}


@pytest.fixture
def made_by_yaml(monkeypatch) -> Callable[..., Any]:
    """The strategy that the command line makes of its part of a yaml, for one CPU unless told otherwise."""
    monkeypatch.setattr("sys.argv", ["lightning-liger"])
    boring = "lightning.pytorch.demos.boring_classes.Boring"

    def make(strategy: Any, **options: Any) -> Any:
        trainer = {"strategy": strategy, "accelerator": "cpu", "devices": 1, "logger": False, **options}
        args = [f"--trainer={yaml.safe_dump(trainer)}", f"--model={boring}Model", f"--data={boring}DataModule"]
        return LigerCLI(args=args, run=False).trainer.strategy

    return make
