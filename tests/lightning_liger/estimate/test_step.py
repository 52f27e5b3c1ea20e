"""A step's memory: all layers and few, plans, sharding."""

from functools import partial

import pytest
import torch
from transformers import AutoConfig

from lightning_liger import apply_liger_kernels
from lightning_liger.activations.layers import find_layers
from lightning_liger.estimate.models import make_batch, make_model
from lightning_liger.estimate.states import states_of
from lightning_liger.estimate.step import GRADIENTS, LOGITS, OPTIMIZER, WEIGHTS, run_step

SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 500, "num_attention_heads": 4, "head_dim": 16}


def _model(model_type="llama", num_layers=9, **settings):
    config = AutoConfig.for_model(model_type, **SIZES, num_key_value_heads=2, num_hidden_layers=num_layers, **settings)
    return make_model(config, torch.bfloat16)


def _step(model, strategy="single", num_gpus=1, **options):
    return run_step(model, partial(make_batch, 2, 512), states_of(model, strategy, num_gpus), **options)


def test_parts_of_a_step():
    model = _model()
    num_bytes = 2 * sum(each.numel() for each in model.parameters())
    plain = _step(model, frees_early=False)
    apply_liger_kernels(model)
    ours = _step(model)
    for step in (plain, ours):
        parts = step.peak(["recompute"] * 9)
        assert (parts[WEIGHTS], parts[OPTIMIZER]) == (pytest.approx(num_bytes, rel=0.02), 2 * num_bytes)
    logits = 2 * 512 * 500
    assert plain.logits_bytes >= 4 * logits + 2 * logits > ours.logits_bytes
    assert plain.peak(["store"] * 9)[LOGITS] > 0
    sizes = [sum(ours.peak([mode] * 9).values()) for mode in ("store", "cheap", "recompute")]
    assert sizes == sorted(set(sizes), reverse=True)
    late = _step(model, frees_early=False)
    assert sum(late.peak(["store"] * 9).values()) - sizes[0] == pytest.approx(num_bytes, rel=0.05)


def test_shards_are_gathered_layer_by_layer():
    model = _model(num_layers=12)
    apply_liger_kernels(model)
    layer = 2 * sum(each.numel() for each in find_layers(model)[0].parameters())
    total = 2 * sum(each.numel() for each in model.parameters())
    root = total - 12 * layer
    parts = _step(model, "fsdp", 4).peak(["store"] * 12)
    assert total / 4 + root <= parts[WEIGHTS] <= total / 4 + root + 2 * layer + 0.02 * total
    assert parts[OPTIMIZER] == pytest.approx(2 * total / 4, rel=0.01)
    ddp, single = (_step(model, *of).peak(["recompute"] * 12) for of in (("ddp", 4), ("single", 1)))
    assert single[GRADIENTS] < total
    assert _step(model, "fsdp", 1).peak(["recompute"] * 12) == single
    assert ddp[GRADIENTS] == 2 * total  # in the second step's forward: its buckets and those of the first step


def test_states_of_precisions():
    model = _model(num_layers=1)
    numbers = sum(each.numel() for each in model.parameters())
    for strategy, precision, optimizer, expected in (
        ("single", "bf16-true", "adamw", (2, 2, 4)),
        ("single", "32-true", "adamw", (4, 4, 8)),
        ("single", "16-true", "sgd", (2, 2, 0)),
        ("fsdp", "bf16-mixed", "sgd_momentum", (1, 1, 1)),
        ("deepspeed_stage_3", "bf16-mixed", "adamw", (0.5, 0.5, 3)),
        ("deepspeed_stage_1", "bf16-true", "adamw", (2, 0.5, 3)),
        ("deepspeed_stage_2", "32-true", "adamw", (4, 1, 3)),  # other float32 weights than the model's
        ("deepspeed_stage_3", "32-true", "sgd", (1, 1, 1)),
    ):
        num_gpus = 1 if strategy == "single" else 4
        states = states_of(model, strategy, num_gpus, precision, optimizer)
        totals = states.totals(model)
        totals["gradients"] -= states.bucket_bytes
        assert [size / numbers for size in totals.values()] == pytest.approx(expected, rel=0.01), (strategy, precision)


def test_a_forward_without_loss_is_refused():
    model = _model(num_layers=2)
    with pytest.raises(TypeError, match="loss"):
        run_step(model, lambda: {"input_ids": make_batch(1, 8)["input_ids"]}, states_of(model))
