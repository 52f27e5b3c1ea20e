"""The global random states of torch, CUDA, numpy and Python, as one value that a checkpoint can hold."""

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The global random states of torch (CPU, and the current CUDA device if it is used), numpy and Python.

    Tensors and plain Python objects only, so that checkpoints load with ``weights_only=True``.
    """
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy_state}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any] | None) -> None:
    """Sets the global random states to those of :func:`random_state`, unless they are None."""
    if state is None:
        return
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    inner = state["numpy"]["state"]
    np.random.set_state(state["numpy"] | {"state": inner | {"key": inner["key"].numpy().astype(np.uint32)}})
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
