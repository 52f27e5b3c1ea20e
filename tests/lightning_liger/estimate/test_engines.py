"""Estimates of engines next to counted allocations of real training on two CPU processes."""

from functools import partial

import pytest
from transformers import AutoConfig

from lightning_liger import apply_liger_kernels
from lightning_liger.estimate import states as states_module
from lightning_liger.estimate.models import make_batch, make_model
from lightning_liger.estimate.states import PRECISIONS, states_of
from lightning_liger.estimate.step import WORKSPACE, run_step
from tests.lightning_liger.estimate.workers import counted
from tests.lightning_liger.strategies.workers.distributed import launch


def estimate(name):
    strategy, precision, settings, with_adapters = counted.ENGINES[name]
    config = AutoConfig.for_model("llama", **counted.CONFIG, **settings)
    model = make_model(config, PRECISIONS[precision].compute, counted.LORA if with_adapters else None)
    apply_liger_kernels(model)
    step = run_step(model, partial(make_batch, 1, counted.NUM_TOKENS), states_of(model, strategy, 2, precision))
    parts = step.peak(["store"] * step.num_layers)
    return sum(parts.values()) - parts[WORKSPACE]


def test_engines_take_what_was_counted(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(states_module, "_BUCKET_SIZE", counted.BUCKET_SIZE)
    found = launch(
        "cpu", tmp_path, worker=counted.__name__, num_ranks=2, environment_of=lambda _: {"DS_ACCELERATOR": "cpu"}
    )
    assert set(found[0]) == set(counted.ENGINES)
    errors = {name: estimate(name) / max(rank[name] for rank in found) - 1 for name in counted.ENGINES}
    assert {name: f"{error:+.1%}" for name, error in errors.items() if abs(error) > 0.08} == {}
