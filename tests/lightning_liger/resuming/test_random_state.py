"""The global random states come back."""

import random

import numpy as np
import pytest
import torch

from lightning_liger.resuming.random_state import random_state, set_random_state


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_states_come_back(tmp_path, device):
    def draw() -> list[float]:
        return [
            torch.rand((), device=device).item(),
            np.random.rand(),
            np.random.randn(),
            random.random(),
            random.gauss(),
        ]

    draw()  # of a gauss and a randn a second number is kept
    torch.save(random_state(), tmp_path / "state")
    first = draw()
    assert draw() != first
    set_random_state(torch.load(tmp_path / "state", weights_only=True))
    assert draw() == first
