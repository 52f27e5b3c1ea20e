"""The global random states of torch, CUDA, numpy and Python, as one value that a checkpoint can hold."""

import random
from typing import Any

import numpy as np
import torch

from liger_ops.arguments import wrong_value


def random_state() -> dict[str, Any]:
    """The global random states of torch (CPU, and the current CUDA device if it is used), numpy and Python.

    Tensors and plain Python objects only, so that checkpoints load with ``weights_only=True``.
    """
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)  # legacy=True returns a tuple
    key = numpy_state["state"]["key"]
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": torch.from_numpy(key.astype(np.int64))}},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Sets the global random states to those of :func:`random_state`; the CUDA one only where a GPU is used.

    Raises:
        ValueError: For anything else; no random state is changed then.
    """
    check_random_state(state)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(_numpy_state(state))
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def check_random_state(state: Any) -> None:
    """Raises ValueError unless ``state`` is one of :func:`random_state`."""
    try:
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(state["python"])
        np.random.RandomState(0).set_state(_numpy_state(state))
    except Exception as error:  # each library raises its own
        expected = "the random states of torch, Python and NumPy"
        raise wrong_value("random_state", f"{expected} ({type(error).__name__}: {error})", state) from error


def _numpy_state(state: dict[str, Any]) -> dict[str, Any]:
    key = state["numpy"]["state"]["key"].numpy().astype(np.uint32)
    return {**state["numpy"], "state": {**state["numpy"]["state"], "key": key}}
