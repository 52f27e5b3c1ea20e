"""What several files of tests get out of one start of processes."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.lightning_liger.strategies.distributed import launch


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
        ranks = launch(device, folder, worker="tests.lightning_liger.strategies.engines")
        started_engines[device] = EngineRuns(device, folder, ranks)
    return started_engines[device]
