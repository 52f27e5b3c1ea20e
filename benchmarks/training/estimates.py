"""Memory as ``lightning-liger inspect`` estimates it, next to what was measured on GPUs.

The estimates need no GPU; the measured peaks are those of ``models``, ``train`` and their files in ``results/``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from benchmarks.records import read_results
from benchmarks.training.arms import Arm
from benchmarks.training.dims import DIMS, make_model
from benchmarks.training.job import OK, Row
from benchmarks.training.models import SETTINGS
from lightning_liger import apply_liger_kernels
from lightning_liger.activations.layers import Mode
from lightning_liger.activations.plan import choose
from lightning_liger.activations.planner import MARGIN
from lightning_liger.estimate.models import make_batch
from lightning_liger.estimate.states import states_of
from lightning_liger.estimate.step import WORKSPACE, Step, run_step

_GIB = 2**30
_ARMS = {"unpatched": "hf", "ours": "ours"}
_MODELS = ("llama3_8b", "qwen3_8b", "gemma3_4b", "olmo2_7b", "granite3_8b", "mixtral_narrow")
"""Of those that were measured with two layers; tests compare them, so not all."""


@dataclass(frozen=True)
class Comparison:
    """A measured peak and its estimate.

    Attributes:
        title: The model.
        arm: The implementation and its plan, as :class:`~benchmarks.training.arms.Arm`.
        setup: GPUs and tokens in words.
        measured, estimated: In GiB.
    """

    title: str
    arm: str
    setup: str
    measured: float
    estimated: float

    @property
    def error(self) -> float:
        """Of the estimate, relative to the measured peak."""
        return self.estimated / self.measured - 1


def compare(results: Path) -> list[Comparison]:
    """All comparisons with the records in a folder."""
    found = list(_of_models(results / "models_h200.jsonl"))
    for name in ("train_llama3_8b_h200", "train_llama3_8b_2xh200"):
        found += _of_training(results / f"{name}.jsonl")
    return found


def _step(
    config: PreTrainedConfig, arm: Arm, sizes: tuple[int, int], num_gpus: int, optimizer: str
) -> tuple[Step, int]:
    """A step, and the bytes of the weights."""
    model = make_model(config, torch.device("meta"), torch.bfloat16)
    if arm.is_ours:
        apply_liger_kernels(model)
    states = states_of(model, "single" if num_gpus == 1 else "fsdp", num_gpus, optimizer=optimizer)
    step = run_step(model, partial(make_batch, *sizes), states, frees_early=arm.is_ours or optimizer == "sgd")
    return step, states.weight_bytes


def _of_models(path: Path) -> Iterator[Comparison]:
    """Two layers, forward and backward: what they add to the weights."""
    names = {dims.title: name for name, dims in DIMS.items()}
    for record in read_results(path).lines:
        name = names[record["model"]]
        if record["arm"] not in _ARMS or name not in _MODELS:
            continue
        arm = Arm(_ARMS[record["arm"]], "none")
        config = DIMS[name].config(2, **SETTINGS.get(name, {}))
        step, weights = _step(config, arm, (4, record["tokens"] // 4), 1, "sgd")
        parts = step.peak(["store"] * step.num_layers)
        estimated = sum(parts.values()) - parts[WORKSPACE] - weights
        setup = f"2 layers, {record['tokens']:,} tokens"
        yield Comparison(record["model"], str(arm), setup, record["peak_mib"] / 1024, estimated / _GIB)


def _of_training(path: Path) -> Iterator[Comparison]:
    """Whole models: the peak of training."""
    steps: dict[tuple[object, ...], Step] = {}
    for row in map(Row.from_json, read_results(path).lines):
        arm = Arm.parse(row.arm)
        if arm.implementation not in _ARMS.values() or row.status != OK or row.peak_gib is None:
            continue
        sizes = row.batch_size, row.sequence_length
        key = row.model, arm.is_ours, row.devices, sizes
        if key not in steps:
            steps[key], _ = _step(DIMS[row.model].config(row.layers), arm, sizes, row.devices, "adamw")
        setup = f"{row.devices} GPU{'s' if row.devices > 1 else ''}, {sizes[0] * sizes[1]:,} tokens"
        estimated = sum(_peak(steps[key], arm).values()) / _GIB
        yield Comparison(DIMS[row.model].title, row.arm, setup, row.peak_gib, estimated)


def _peak(step: Step, arm: Arm) -> dict[str, int]:
    if arm.plan.endswith("GiB"):
        limit = float(arm.plan.removesuffix("GiB")) * _GIB
        return step.peak(choose(step.profile, (1 - MARGIN) * limit).modes)
    stored: Mode = "cheap" if arm.is_ours else "store"
    return step.peak(["recompute" if arm.plan == "full" else stored] * step.num_layers)
