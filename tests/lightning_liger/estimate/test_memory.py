"""Inspections of models: rows, what fits, models by folder, name and architecture, the measured error."""

import functools
import math
import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from lightning import Fabric
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.records import read_results
from benchmarks.training.dims import DIMS
from benchmarks.training.job import Row
from liger_ops.fp8.weights import Float8Weight
from lightning_liger import FabricLigerSingleDeviceStrategy, LigerCausalLM
from lightning_liger.estimate import inspect_model
from lightning_liger.estimate.memory import _FLOAT8_PEAK_SHARE, _PEAK_SHARE, HUGGING_FACE, OURS, largest
from lightning_liger.estimate.models import find_config
from lightning_liger.estimate.states import states_of
from lightning_liger.estimate.step import OWNERS
from lightning_liger.hardware import Gpu, get_gpu
from lightning_liger.training.lora import add_adapters
from tests.lightning_liger.estimate.test_step import SIZES
from tests.lightning_liger.tiny import TINY_CONFIG

ROOT = Path(__file__).parents[3]
FLOAT8_RESULTS = ROOT / "benchmarks" / "results" / "fp8"
TINY = {**SIZES, "num_hidden_layers": 6, "num_key_value_heads": 2}


def test_estimates_are_within_a_tenth_of_measured_peaks():
    """The table is compared with a fresh one by ``tests/test_docs.py``."""
    page = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (\w+):\S+ \| .* \| ([+-][\d.]+)% \|$", page, re.MULTILINE)
    assert len({model for model, _, _ in rows}) >= 5
    assert {implementation for _, implementation, _ in rows} >= {"hf", "ours"}
    assert all(abs(float(error)) < 10 for _, _, error in rows)


@pytest.mark.parametrize("state_dtype", [None, "bfloat16", "8bit"])
def test_moments_take_as_many_bytes_as_those_of_the_optimizer(state_dtype):
    config = TINY_CONFIG | {"hidden_size": 264, "num_hidden_layers": 1}
    module = LigerCausalLM(config=config, state_dtype=state_dtype, num_training_steps=1)
    module.configure_model()
    optimizer = module.configure_optimizers()["optimizer"]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stored = [value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    name = "_".join(filter(None, ("adamw", state_dtype)))
    assert states_of(module.model, optimizer=name, precision="32-true").optimizer_bytes == sum(stored)
    sharded = states_of(module.model, "fsdp2", 2, optimizer=name, precision="32-true").optimizer_bytes
    assert sharded == pytest.approx(sum(stored) / 2, rel=1e-3)


@pytest.fixture
def small_gpu(monkeypatch):
    """The name of a GPU whose memory a tiny model can fill."""
    gpu = Gpu("tiny GPU", int(1.25 * 2**30), 1.0, 1.0, 1.0)
    monkeypatch.setattr("lightning_liger.estimate.memory.get_gpu", lambda name: gpu)
    return "tiny"


def test_inspection_of_an_architecture(small_gpu):
    found = inspect_model("llama", config=TINY, gpu=small_gpu, batch_size=2, seq_len=256)
    assert [row.activations for row in found.rows] == [
        *("stored", "cheap dropped", "recomputed", "plan"),
        *("stored", "recomputed"),
    ]
    assert [row.implementation for row in found.rows] == [OURS] * 4 + [HUGGING_FACE] * 2
    assert found.unknown is None
    assert found.kernels.num_replaced == 6 + 6 + 13 + 1
    assert all(row.fits and tuple(row.num_bytes) == OWNERS for row in found.rows)
    assert found.rows[3].plan == "all 6 layers stored"
    ours, plain = found.fits
    assert ours.longest_seq_len > 2 * plain.longest_seq_len > 0
    assert ours.largest_batch_size > 2 * plain.largest_batch_size > 0
    assert any("max_position_embeddings" in note for note in found.notes)
    assert found.limit_bytes is not None
    for batch_size, fits in ((plain.largest_batch_size, True), (int(1.05 * plain.largest_batch_size), False)):
        again = inspect_model("llama", config=TINY, batch_size=batch_size, seq_len=256)
        assert (again.rows[-1].total <= found.limit_bytes) == fits


def test_what_fits_a_gpu_is_within_the_memory_budget(small_gpu):
    sizes = []
    for budget in ("auto", 0.17, 0.14, 0.02):
        given = {"config": TINY, "gpu": small_gpu, "memory_budget": budget, "seq_len": 256}
        found = inspect_model("llama", **given, batch_size=8)
        ours, plain = found.fits
        plan = next(row for row in found.rows if row.activations == "plan")
        assert plan.fits == (plan.total <= found.budget_bytes) == (budget != 0.02), budget
        assert found.rows[2].fits  # not of the plan
        sizes.append((ours.longest_seq_len, ours.largest_batch_size))
        assert plain.largest_batch_size > 0
        if ours.largest_batch_size:
            again = inspect_model("llama", **given, batch_size=ours.largest_batch_size)
            assert next(row for row in again.rows if row.activations == "plan").fits
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] == (0, 0)


def test_budgets_and_adapters():
    config = {**TINY, "hidden_size": 512, "intermediate_size": 2048}
    plain = inspect_model("llama", config=config, batch_size=8, seq_len=8192)
    peaks = [row.total / 2**30 for row in plain.rows[:3]]
    budget = max(1.01, (peaks[1] + peaks[2]) / 2)
    found = inspect_model("llama", config=config, batch_size=8, seq_len=8192, memory_budget=budget)
    plan = found.rows[3]
    assert plan.plan is not None
    assert "recomputed" in plan.plan
    assert plan.total / 2**30 <= budget
    pytest.importorskip("peft")
    adapted = inspect_model("llama", config=TINY, lora={"r": 4})
    assert 0 < adapted.num_trained < 0.1 * adapted.num_parameters
    assert adapted.state_bytes["gradients"] == 2 * adapted.num_trained


def test_adapters_of_experts_add_no_activation_of_their_weights_size():
    pytest.importorskip("peft")
    config = {**TINY, "num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    lora = {"r": 2, "target_modules": ["q_proj"]}
    plain, adapted = (
        inspect_model("qwen3_moe", config=config, seq_len=32, lora={**lora, **others})
        for others in ({}, {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]})
    )
    assert adapted.unknown is None
    (before, after) = (found.rows[0].num_bytes["activations"] for found in (plain, adapted))
    hidden_size = AutoConfig.for_model("qwen3_moe", **config).hidden_size
    num_layers = AutoConfig.for_model("qwen3_moe", **config).num_hidden_layers
    added = 2 * (adapted.num_trained - plain.num_trained)  # A and B in bfloat16
    assert before < after <= before + 2 * added < before + num_layers * 64 * 64 * hidden_size * 2
    assert {row.implementation for row in adapted.rows} == {"lightning-liger"}
    assert any(note.startswith("memory of Hugging Face is unknown") for note in adapted.notes)


def test_models_by_folder(tmp_path):
    AutoConfig.for_model("llama", **TINY).save_pretrained(tmp_path)
    assert find_config(str(tmp_path)).vocab_size == find_config(str(tmp_path / "config.json")).vocab_size == 500
    assert find_config(str(tmp_path), {"vocab_size": 100}).vocab_size == 100
    with pytest.raises(FileNotFoundError, match=r"got '/no/where'$"):  # which no architecture is meant by
        find_config("/no/where")


def test_the_largest_that_fits():
    for limit, step, start, most, expected in (
        (1000, 1, 1, 10**6, 900),
        (1000, 256, 2048, 10**6, 768),
        (50, 1, 7, 10**6, 0),
        (10**9, 1, 3, 5000, 5000),
        (100 + 3, 1, 50, 10**6, 3),
    ):
        needed = MagicMock(side_effect=lambda number: 100 + number)
        found = largest(needed, limit, start, step, most)
        assert 0.97 * expected <= found <= expected, (limit, step, found)
        assert needed.call_count < 12


def test_float8_keeps_less_and_needs_less():
    """Between the products of a gated MLP nothing is kept but gate and up, not even for the last product."""
    config = {**TINY, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 2}
    plain, found = (inspect_model("llama", config=config, batch_size=8, fp8=fp8) for fp8 in (False, True))
    assert {each.replacement for each in found.kernels.entries if each.kernel == "fp8"} > {None}
    for row in (0, 2):  # stored and recomputed
        assert found.rows[row].num_bytes["activations"] < plain.rows[row].num_bytes["activations"]
    assert found.as_dict()["settings"]["fp8"]


@functools.cache
def estimate(model, batch_size, gpu):
    dims = DIMS[model]
    config = dims.sizes | {"num_hidden_layers": dims.num_layers}
    return inspect_model(dims.model_type, config=config, batch_size=batch_size, gpu=gpu, fp8=True)


@pytest.mark.parametrize(
    ("model", "name", "plans", "gpu"),
    [
        ("llama3_8b", "llama3_8b_h200", ("110GiB", "110GiB"), "h200-141gb"),
        ("llama3_8b", "llama3_8b_h200", ("72.9GiB", "71GiB"), "h200-141gb"),
        ("llama3_8b", "llama3_8b_least_memory_h200", ("61.3GiB", "61GiB"), "h200-141gb"),
        ("llama3_1b", "llama3_1b_h200", ("none", "none"), "h200-141gb"),
        ("qwen3_8b", "qwen3_8b_h100", ("72GiB", "72GiB"), "h100-80gb"),
    ],
)
def test_float8_is_as_much_faster_as_measured_within_a_tenth(monkeypatch, model, name, plans, gpu):
    monkeypatch.setattr("lightning_liger.estimate.memory.run_step", MagicMock(side_effect=NotImplementedError))
    rows = list(map(Row.from_json, read_results(FLOAT8_RESULTS / f"train_{name}.jsonl").lines))
    arms = (f"{arm}:{plan}" for arm, plan in zip(("ours", "ours_fp8"), plans, strict=True))
    before, after = (next(row for row in rows if row.arm == arm) for arm in arms)
    found = estimate(model, before.batch_size, gpu)
    slow, fast = found.step_seconds(False), found.step_seconds(True)
    assert slow / fast == pytest.approx(after.tokens_per_second / before.tokens_per_second, rel=0.1)
    assert found.as_dict()["step_seconds"] == fast
    num_tokens = before.batch_size * before.sequence_length
    if plans[0] == "110GiB":  # in which nothing is recomputed
        assert 0.9 < slow * before.tokens_per_second / num_tokens < 1
        assert 0.9 < fast * after.tokens_per_second / num_tokens < 1


def test_assumed_shares_of_the_peaks_are_those_of_a_layer():
    gpu = get_gpu("h200-141gb")
    lines = read_results(FLOAT8_RESULTS / "layer_h200.jsonl").lines
    for contender, peak, share in (
        ("bfloat16", gpu.bfloat16_flops, _PEAK_SHARE),
        ("float8", gpu.float8_flops, _FLOAT8_PEAK_SHARE),
    ):
        layer = ("llama3_8b", "layer", contender)
        (line,) = (each for each in lines if (each["model"], each["kind"], each["contender"]) == layer)
        assert line["flops"] / (line["ms"] / 1e3) == pytest.approx(share * peak, rel=0.01)


LARGE = {**TINY, "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 1}
"""A model whose MLP is large enough for float8."""


def test_no_flops_in_float8_where_calls_have_too_few_tokens():
    least = math.ceil(3e11 / (3 * 2048 * 4096))
    found = [inspect_model("llama", config=LARGE, seq_len=length, fp8=True) for length in (least - 1, least)]
    assert [each.float8_flops_per_token for each in found] == [0, 6 * 3 * 2048 * 4096]


def test_frozen_weights_take_the_bytes_that_a_model_in_float8_holds():
    pytest.importorskip("peft")
    lora = {"r": 2, "target_modules": ["down_proj"]}
    options = {"config": LARGE, "lora": lora, "fp8": True}
    single, ddp, sharded, whole = (
        inspect_model("llama", **options, strategy=strategy, num_gpus=num_gpus)
        for strategy, num_gpus in (("single", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp", 1))
    )
    config = AutoConfig.for_model("llama", **LARGE)
    model = add_adapters(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), lora)
    strategy = FabricLigerSingleDeviceStrategy(fp8=True)
    module = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision="bf16-true").setup_module(model)
    held = [each for each in module.parameters() if isinstance(each, Float8Weight)]
    assert sum(each.numel() for each in held) == 3 * 2048 * 4096
    others = [each for each in module.parameters() if not isinstance(each, Float8Weight)]
    num_bytes = sum(each.nbytes for each in others) + sum(each.payload.nbytes + each.scale.nbytes for each in held)
    assert single.state_bytes["weights"] == ddp.state_bytes["weights"] == num_bytes
    assert whole.state_bytes["weights"] == 2 * whole.num_parameters
    assert sharded.state_bytes["weights"] == pytest.approx(whole.num_parameters, abs=2)
    for row, other in zip(single.rows, whole.rows, strict=True):
        is_held = row.implementation == OURS
        saved = 3 * 2048 * 4096 - 4 * (2 * 4096 + 2048) if is_held else 0
        assert other.num_bytes["weights"] - row.num_bytes["weights"] == saved
        assert row.num_bytes["activations"] <= other.num_bytes["activations"]  # payloads are no activations
