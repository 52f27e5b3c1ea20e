"""One thread, as the sizes are tiny; and what the command line says of wrong arguments."""

from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.__main__ import main


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def rejected(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return call
