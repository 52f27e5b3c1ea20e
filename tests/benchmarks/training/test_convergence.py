"""Tiny models learn the same with kernels and each plan as without: within the noise of two stock runs.

Without a GPU the kernels' references run; ``python -m benchmarks convergence`` runs the kernels.
"""

import pytest
import torch

from benchmarks.training.convergence import ARCHITECTURES, FACTOR, PLANS, curves, distances

NUM_STEPS = 6


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_losses_stay_within_the_noise(architecture: str) -> None:
    found = curves(architecture, torch.float32, NUM_STEPS)
    noise, run_distances = distances(found)
    assert set(run_distances) == set(PLANS)
    assert max(run_distances.values()) <= FACTOR * noise, run_distances
    stock = found[0].losses
    assert stock[-1] < stock[0] - 0.1  # they do learn
    by_run = {curve.run: curve.losses for curve in found}
    for plan in PLANS:
        assert by_run[plan] == by_run["kernels"], plan
