"""Memory as ``lightning-liger inspect`` estimates it, next to what was measured on GPUs.

    python -m benchmarks.training.estimates --out benchmarks/results/engines_2xh200

measures the peak of training under each engine, on 2 GPUs. The other measured peaks are those of ``models``, ``train``
and their files in ``results/``. The estimates need no GPU.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig

from benchmarks.environment import environment
from benchmarks.records import Writer, read_results
from benchmarks.training.arms import FLOAT8, Arm
from benchmarks.training.dims import DIMS, make_model
from benchmarks.training.job import OK, Job, Row
from benchmarks.training.models import SETTINGS
from benchmarks.training.processes import run_jobs
from lightning_liger import Float8Recipe, apply_liger_kernels
from lightning_liger.activations.layers import Mode
from lightning_liger.activations.plan import choose
from lightning_liger.activations.planner import MARGIN
from lightning_liger.estimate.models import make_batch
from lightning_liger.estimate.models import make_model as make_trained_model
from lightning_liger.estimate.states import PRECISIONS, STRATEGIES, states_of
from lightning_liger.estimate.step import WORKSPACE, Step, run_step

_GIB = 2**30
_ARMS = {"unpatched": "hf", "ours": "ours"}
_MODELS = ("llama3_8b", "qwen3_8b", "gemma3_4b", "olmo2_7b", "granite3_8b", "mixtral_narrow")
"""Of those that were measured with two layers; tests compare them, so not all."""
_CHANGED = {("mixtral_narrow", "ours")}
"""What was measured before our experts' kernels, which take less memory."""
_ENGINES = (
    "ours:ddp:bf16-true",
    "hf:ddp:bf16-true",
    "ours:ddp:32-true",
    "ours:ddp:bf16-true:16",
    "ours:fsdp:32-true",
    "ours:fsdp:bf16-mixed",
    "ours:fsdp:bf16-true:16",
    "ours:fsdp2:bf16-true",
    "ours:deepspeed_stage_2:bf16-true",
    "ours:deepspeed_stage_2:32-true",
    "ours:deepspeed_stage_3:bf16-true",
    "ours:deepspeed_stage_3:32-true",
)
"""What is measured of engines: the implementation, the strategy, the precision and the rank of adapters, if any."""
_ENGINES_OF = ("llama3_1b", 4, 2048)
"""The model, whose head is tied, the rows of each GPU and their tokens."""


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
    found = list(_model_comparisons(results / "models_h200.jsonl"))
    for name in ("train_llama3_8b_h200", "train_llama3_8b_2xh200"):
        found += _training_comparisons(results / f"{name}.jsonl")
    for path in sorted(results.glob("engines_*.jsonl")):
        rows = map(Row.from_json, read_results(path).lines)
        found += [engine_comparison(row) for row in rows if row.peak_gib is not None]
    return found


def engine_comparison(row: Row) -> Comparison:
    """A measured engine, all of whose layers' activations are stored, in ours but for cheap tensors."""
    dtype, ours = PRECISIONS[row.precision].compute, row.parsed_arm.is_ours
    lora = {"r": row.lora_rank} if row.lora_rank else None
    model = make_trained_model(DIMS[row.model].config(row.layers), dtype, lora)
    if ours:
        apply_liger_kernels(model)
    states = states_of(model, row.strategy, row.devices, row.precision)
    frees_early = ours or STRATEGIES[row.strategy].frees_early
    step = run_step(model, partial(make_batch, row.batch_size, row.sequence_length), states, frees_early)
    adapters = ", LoRA" if lora else ""
    tokens = f"{row.batch_size * row.sequence_length:,} tokens"
    setup = f"{row.devices} GPUs, {STRATEGIES[row.strategy].title}, {row.precision}{adapters}, {tokens}"
    estimated = sum(_peak(step, row.parsed_arm).values())
    assert row.peak_gib is not None
    return Comparison(DIMS[row.model].title, row.arm, setup, row.peak_gib, estimated / _GIB)


def jobs(engines: Sequence[str], devices: int, layers: int | None = None, tiny: bool = False) -> list[Job]:
    """The jobs of lines such as those of ``_ENGINES``."""
    model, *shape = _ENGINES_OF
    found = []
    for line in engines:
        implementation, strategy, precision, rank = (*line.split(":"), "0")[:4]
        settings = {"strategy": strategy, "precision": precision, "lora_rank": int(rank), "tiny": tiny}
        arm = f"{implementation}:none"
        sizes = (1, 16) if tiny else (shape[0], shape[1])
        found.append(Job(model, arm, (sizes,), layers, devices, warm_up=2, steps=1, **settings))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the engines and prints each peak next to its estimate."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.estimates", description=__doc__)
    parser.add_argument("--engines", default=",".join(_ENGINES), help="IMPLEMENTATION:STRATEGY:PRECISION[:RANK],...")
    parser.add_argument("--devices", type=int, default=2, help="GPUs (default: 2)")
    parser.add_argument("--layers", type=int, help="depth (default: the published one)")
    parser.add_argument("--seconds", type=float, default=140.0, help="after which no other engine is measured")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, also on CPUs, where no peak is measured")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, without .jsonl")
    options = parser.parse_args(arguments)
    if torch.cuda.device_count() < options.devices and not options.quick:
        parser.error(f"--devices {options.devices} needs as many GPUs, got {torch.cuda.device_count()}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, width=160)
    begin = time.monotonic()
    rows = []
    waiting = jobs(options.engines.split(","), options.devices, options.layers, options.quick)
    with Writer(Path(f"{options.out}.jsonl"), environment(), "estimates") as writer:
        for row in run_jobs(waiting, timeout=60.0):
            writer.write(row)
            rows.append(row)
            seconds = time.monotonic() - begin
            console.print(f"{seconds:.0f} s: {row.arm} {row.strategy} {row.precision} {row.status}", row.error or "")
            if seconds > options.seconds:
                console.print(f"{len(waiting) - len(rows)} were not measured: choose them with --engines")
                break
    table = Table("model", "arm", "setup", "measured GiB", "estimated GiB", "error")
    for row in rows:
        if row.peak_gib is None:
            table.add_row(row.model, row.arm, f"{row.strategy}, {row.precision}", row.status, "-", row.error or "-")
            continue
        one = engine_comparison(row)
        numbers = f"{one.measured:.2f}", f"{one.estimated:.2f}", f"{one.error:+.1%}"
        table.add_row(one.title, one.arm, one.setup, *numbers)
    console.print(table)
    console.print(f"wrote {options.out}.jsonl")
    return 0 if all(row.status == OK for row in rows) else 1


def _step(
    config: PreTrainedConfig, arm: Arm, sizes: tuple[int, int], num_gpus: int, optimizer: str
) -> tuple[Step, int]:
    """A step, and the bytes of the weights."""
    model = make_model(config, torch.device("meta"), torch.bfloat16)
    if arm.is_ours:
        recipe = FLOAT8.get(arm.implementation)
        apply_liger_kernels(model, fp8=None if recipe is None else Float8Recipe(**recipe))
    states = states_of(model, "single" if num_gpus == 1 else "fsdp", num_gpus, optimizer=optimizer)
    step = run_step(model, partial(make_batch, *sizes), states, frees_early=arm.is_ours or optimizer == "sgd")
    return step, states.weight_bytes


def _model_comparisons(path: Path) -> Iterator[Comparison]:
    """Two layers, forward and backward: what they add to the weights."""
    names = {dims.title: name for name, dims in DIMS.items()}
    for record in read_results(path).lines:
        name = names[record["model"]]
        if record["arm"] not in _ARMS or name not in _MODELS:
            continue
        if (name, _ARMS[record["arm"]]) in _CHANGED:
            continue
        arm = Arm(_ARMS[record["arm"]], "none")
        config = DIMS[name].config(2, **SETTINGS.get(name, {}))
        step, weights = _step(config, arm, (4, record["tokens"] // 4), 1, "sgd")
        parts = step.peak(["store"] * step.num_layers)
        estimated = sum(parts.values()) - parts[WORKSPACE] - weights
        setup = f"2 layers, {record['tokens']:,} tokens"
        yield Comparison(record["model"], str(arm), setup, record["peak_mib"] / 1024, estimated / _GIB)


def _training_comparisons(path: Path) -> Iterator[Comparison]:
    """Whole models: the peak of training."""
    steps: dict[tuple[object, ...], Step] = {}
    for row in map(Row.from_json, read_results(path).lines):
        arm = Arm.parse(row.arm)
        if arm.implementation.partition("_fp8")[0] not in _ARMS.values() or row.status != OK or row.peak_gib is None:
            continue
        sizes = row.batch_size, row.sequence_length
        key = row.model, arm.implementation, row.devices, sizes
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


if __name__ == "__main__":
    sys.exit(main())
