"""Cheap tensors are kept where a GPU waits for the host and has memory to spare, with the same gradients."""

import random

import pytest
import torch
from torch import nn

from lightning_liger.activations.pace import Pace, pace_of
from tests.lightning_liger.activations.programs import RandomLayer, assert_equal, controlled, outcome


def test_kept_after_eight_idle_passes_in_a_row_if_four_times_the_bytes_are_free():
    for seed in range(200):
        rng = random.Random(seed)
        idle, free = [True], [0]
        pace = Pace(lambda: idle[0], lambda: free[0])  # noqa: B023
        num_passes, expected = 0, 0
        for _ in range(60):
            idle[0], free[0] = rng.random() < 0.9, rng.randrange(1000)
            num_tokens, num_bytes = rng.randrange(1, 100), rng.randrange(250)
            assert pace.keeps(num_tokens) == (num_tokens <= expected)
            if num_tokens <= expected:
                continue  # layers do not ask
            pace.pass_ends(num_tokens, num_bytes)
            num_passes = num_passes + 1 if idle[0] else 0
            if num_passes == 8:
                num_passes = 0
                expected = num_tokens if 4 * num_bytes <= free[0] else expected
            assert pace.kept_tokens == expected
            assert (f"up to {expected} tokens" in pace.summary) == (expected > 0)


def test_layers_stop_dropping_cheap_tensors_and_gradients_stay():
    num_dropping = 0
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Sequential(*(RandomLayer(10 * seed + index) for index in range(3)))
        expected = outcome(model, False)
        control = controlled(model, *["cheap"] * 3)
        asked: list[None] = []
        control.pace = Pace(lambda: asked.append(None) is None, lambda: 10**9)  # noqa: B023
        for number in range(10):
            for each in control.sizes:
                each.cheap = -1
            assert_equal(outcome(model, False), expected)
            assert (control.sizes[0].cheap == -1) == (number >= 8)  # is counted where tensors may be dropped
            num_dropping += sum(each.cheap > 0 for each in control.sizes)
        assert len(asked) == 8
        control.pace, control.observer = Pace(lambda: True, lambda: 0, kept_tokens=10**9), None
        control.graphs = None
        assert_equal(outcome(model, False), expected)
        assert control.sizes[0].cheap == -1
    assert num_dropping > 50


@pytest.mark.gpu
def test_gpus_wait_or_do_not_and_captures_go_on():
    pace = pace_of(torch.device("cuda", 0))
    torch.cuda.synchronize()
    assert pace.is_idle()
    assert 0 < pace.free_bytes() < torch.cuda.get_device_properties(0).total_memory
    torch.cuda._sleep(10**9)
    assert not pace.is_idle()
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
        assert not pace.is_idle()


def test_nothing_tells_on_cpus():
    assert pace_of(torch.device("cpu")) is None
