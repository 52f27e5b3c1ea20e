"""Fixtures and markers that every test shares."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Read by Triton when its functions are decorated, so it has to be set before liger_ops is imported.
    os.environ["TRITON_INTERPRET"] = "1"

os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub at import

# Threads cost more than they gain on tensors of the tests' sizes, and processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

LONG = ("traced", "hub", "ops", "compile", "uses", "random_modules", "commands", "cli", "architectures", "memory")
"""Names of files that take long, of those without ranks."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files that take long come first, so that processes that share the work end together.
    long = {item.path for item in items if "ranks" in item.fixturenames or item.path.parent == Path(__file__).parent}
    long |= {item.path for item in items if item.path.stem.removeprefix("test_") in LONG}
    items.sort(key=lambda item: item.path not in long)
    num_gpus = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and num_gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("multi_gpu") and num_gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs 2 CUDA GPUs, found {num_gpus}"))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays, and looking through it would take long in each collection


@pytest.fixture(autouse=True)
def _restore_process_state() -> Iterator[None]:
    """Undoes what a test left behind in the process: dtype, environment, process group, level of Lightning's log."""
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    torch.manual_seed(0)
    yield
    log.setLevel(level)
    torch.set_default_dtype(dtype)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
