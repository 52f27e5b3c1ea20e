"""The global random states come back."""

import random

import numpy as np
import pytest
import torch

from lightning_liger.resuming.random_state import random_state, set_random_state


def draw() -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), float(np.random.randn()), random.random(), random.gauss()]


def test_random_states_come_back(tmp_path):
    random.gauss()  # keeps a second number
    np.random.randn()  # keeps a second number
    torch.save(random_state(), tmp_path / "state")
    first = draw()
    assert draw() != first
    set_random_state(torch.load(tmp_path / "state", weights_only=True))
    assert draw() == first


@pytest.mark.gpu
def test_random_state_of_the_gpu_comes_back():
    torch.cuda.init()
    state = random_state()
    first = torch.rand(3, device="cuda")
    set_random_state(state)
    torch.testing.assert_close(torch.rand(3, device="cuda"), first, rtol=0.0, atol=0.0)
