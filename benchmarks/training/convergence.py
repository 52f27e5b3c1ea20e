"""``convergence``: losses with kernels and with each plan, compared with how far apart two stock runs are.

Two stock runs that sum in different orders (rows reversed, or two micro-batches) drift apart by rounding. That is the
noise; the losses of a run with kernels have to stay within it. With ``--seeds`` arms are compared over several seeds
instead, by their loss on held-out text; a second call with the same ``--out`` adds the runs that are missing.
"""

import argparse
import copy
import dataclasses
import inspect
import json
import math
import pydoc
import tarfile
import typing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoConfig

from benchmarks.arguments import names
from benchmarks.environment import environment
from benchmarks.records import Writer, read_results
from benchmarks.training import seeds
from benchmarks.training.arms import Arm, parse_arms
from benchmarks.training.dims import DIMS, make_model
from benchmarks.training.job import Job, Row
from benchmarks.training.processes import run_jobs
from benchmarks.training.train import describe, name_of, number
from benchmarks.training.worker import text
from lightning_liger import apply_liger_kernels

_SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 16},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
}
"""Architectures of tiny models with their settings."""

STOCK = ("stock", "stock, rows reversed", "stock, two micro-batches")
PLANS: dict[str, tuple[str, ...]] = {
    "kernels": (),
    "all stored": ("store",),
    "cheap recomputed": ("cheap",),
    "layers recomputed": ("recompute",),
    "layers offloaded": ("offload",),
    "mixed": ("recompute", "cheap", "store"),
}
"""Plans, each with the modes of the layers in turn."""

FACTOR = 3.0
"""How many times the noise a run may differ: two runs with other kernels differ in more places than two stock runs."""

_BATCH_SIZE, _LENGTH = 8, 64
_MODULES: tuple[Any, ...] = (argparse, inspect, pydoc, tarfile, typing)


@dataclass(frozen=True)
class Curve:
    """The losses of a run.

    Attributes:
        architecture: A model type of transformers.
        dtype: Of parameters and activations.
        run: One of ``STOCK`` or ``PLANS``.
        losses: Of each step.
    """

    architecture: str
    dtype: str
    run: str
    losses: list[float]

    def to_json(self) -> str:
        return json.dumps({"curve": dataclasses.asdict(self)})


def batches(num: int, batch_size: int = _BATCH_SIZE, length: int = _LENGTH) -> list[Tensor]:
    """Rows of bytes of modules of Python's standard library, in random order."""
    text = b"".join(Path(module.__file__).read_bytes() for module in _MODULES)
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, length, length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    return list(rows[order[: num * batch_size]].split(batch_size))


def train(model: nn.Module, data: Sequence[Tensor], run: str) -> list[float]:
    """The losses of training on each batch once."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in data:
        ids = (batch.flip(0) if run == "stock, rows reversed" else batch).to(device)
        parts = ids.chunk(2) if run == "stock, two micro-batches" else (ids,)
        loss = torch.zeros((), device=device)
        for part in parts:
            own = model(input_ids=part, labels=part).loss / len(parts)
            own.backward()
            loss += own.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return torch.stack(losses).tolist()


def curves(
    architecture: str, dtype: torch.dtype, num_steps: int, plans: Sequence[str] = tuple(PLANS), device: str = "cpu"
) -> list[Curve]:
    """The curves of the stock runs and of each plan, all from the same weights and batches."""
    config = AutoConfig.for_model(architecture, **_SIZES | ARCHITECTURES[architecture])
    original = make_model(config, torch.device(device), dtype)
    data = batches(num_steps)
    found = []
    for run in (*STOCK, *plans):
        model = copy.deepcopy(original)
        if run in PLANS:
            apply_liger_kernels(model)
            _control(model, PLANS[run])
        found.append(Curve(architecture, str(dtype).removeprefix("torch."), run, train(model, data, run)))
    return found


def _control(model: nn.Module, modes: Sequence[str]) -> None:
    if not modes:
        return
    from lightning_liger.activations.layers import control_layers

    layers = control_layers(model)
    if layers is None:
        raise ValueError("no layers were found")
    for index in range(len(layers.layers)):
        layers.modes[index] = modes[index % len(modes)]


def distance(losses: Sequence[float], others: Sequence[float]) -> float:
    """The root mean square difference of two curves."""
    return math.sqrt(sum((one - other) ** 2 for one, other in zip(losses, others, strict=True)) / len(losses))


def distances(found: Sequence[Curve]) -> tuple[float, dict[str, float]]:
    """The noise, and the distance of each run with kernels from the first stock run.

    The noise is at least the rounding of a loss in the runs' dtype.
    """
    by_run = {curve.run: curve.losses for curve in found}
    stock = by_run[STOCK[0]]
    eps = torch.finfo(getattr(torch, found[0].dtype)).eps
    noise = max(eps * max(stock), *(distance(by_run[run], stock) for run in STOCK[1:]))
    return noise, {run: distance(losses, stock) for run, losses in by_run.items() if run not in STOCK}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="of tiny models (default: 200)")
    parser.add_argument(
        "--text-steps",
        type=int,
        default=300,
        metavar="N",
        help="of a large model on Python's standard library (default: 300; 0 leaves it out)",
    )
    parser.add_argument(
        "--text-model",
        choices=tuple(DIMS),
        metavar="NAME",
        help="that model, with 16384 words (default: llama3_1b, with --seeds llama_120m)",
    )
    parser.add_argument(
        "--text-arms",
        type=parse_arms,
        default=parse_arms("hf,ours"),
        metavar="ARM,...",
        help="its arms (default: hf,ours), as in train; a second run of the first arm with rows reversed is the noise",
    )
    parser.add_argument(
        "--only",
        type=names("architecture", ARCHITECTURES),
        default=tuple(ARCHITECTURES),
        metavar="NAME,...",
        help=f"which tiny models (default: {','.join(ARCHITECTURES)}; an empty list leaves them out)",
    )
    parser.add_argument(
        "--plans",
        type=names("plan", PLANS),
        default=tuple(PLANS),
        metavar="PLAN,...",
        help=f"default: {','.join(PLANS)}",
    )
    parser.add_argument("--timeout", type=float, default=570.0, metavar="SECONDS", help="of one arm (default: 570)")
    parser.add_argument(
        "--seeds", type=int, default=0, metavar="N", help="instead, a model on text with N seeds, on all GPUs"
    )
    parser.add_argument(
        "--seeds-arms",
        type=parse_arms,
        default=parse_arms("ours,ours_fp8"),
        metavar="ARM,...",
        help="its arms (default: ours,ours_fp8); the first one also trains with rows reversed",
    )
    parser.add_argument("--seeds-steps", type=int, default=1000, metavar="N", help="its steps (default: 1000)")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="its runs at a time on a GPU (default: 4)")
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="no run starts that would end later (default: 540)"
    )


def text_jobs(arms: Sequence[Arm], model: str, steps: int, cache: str, tiny: bool) -> list[Job]:
    """Jobs that train on the same text; the second is the first with the rows of each batch reversed."""
    batch_size, length = (2, 32) if tiny else (8 if model == "llama3_1b" else 4, 1024)
    jobs = [
        Job(
            model=model,
            arm=str(arm),
            shapes=((batch_size, length),),
            warm_up=0,
            steps=steps,
            learning_rate=3e-4,
            learning_rate_warm_up=max(1, steps // 15),
            text_cache=cache,
            every_linear_fp8=True,
            vocab_size=512 if tiny else 16384,
            tiny=tiny,
        )
        for arm in arms
    ]
    return [jobs[0], dataclasses.replace(jobs[0], permute_rows=True), *jobs[1:]]


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes; returns whether all losses are within the noise."""
    from lightning_liger.data.module import default_cache_dir

    if options.seeds:
        return _run_seeds(options, Path(f"{stem}.jsonl"), str(default_cache_dir()), console)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = (torch.float32,) if options.quick else (torch.float32, torch.bfloat16)
    steps = 3 if options.quick else options.steps
    asked = [(name, dtype, steps, options.plans, device) for name in options.only for dtype in dtypes]
    found: list[list[Curve]] = []
    rows: list[Row] = []
    with Writer(Path(f"{stem}.jsonl"), environment(), "convergence") as writer:
        with ExitStack() as stack:
            jobs: Iterable[list[Curve]] = (curves(*one) for one in asked)
            if asked and not options.quick:
                # Tiny models leave a GPU idle: all of them at once.
                workers = ProcessPoolExecutor(min(len(asked), 10), mp_context=get_context("spawn"))
                jobs = stack.enter_context(workers).map(curves, *zip(*asked, strict=True))
            for group in jobs:
                found.append(group)
                for curve in group:
                    writer.write(curve)
        if found:
            console.print(table(found))
        if options.text_steps:
            cache = str(default_cache_dir())
            text_steps = 3 if options.quick else options.text_steps
            runs = text_jobs(options.text_arms, options.text_model or "llama3_1b", text_steps, cache, options.quick)
            for row in run_jobs(runs, in_process=options.quick, timeout=options.timeout):
                writer.write(row)
                rows.append(row)
                console.print(describe(row))
            console.print(text_table(rows))
    within = all(value <= FACTOR * noise for noise, runs in map(distances, found) for value in runs.values())
    return within and all(row.status != "failed" for row in rows if row.parsed_arm.is_ours)


def _run_seeds(options: argparse.Namespace, path: Path, cache: str, console: Console) -> bool:
    """Trains the runs that are missing in a file, adds them to it and prints a table of all."""
    tiny = options.quick
    steps = 3 if tiny else options.seeds_steps
    model = options.text_model or "llama_120m"
    jobs = seeds.make_jobs(options.seeds_arms, model, options.seeds, steps, cache, tiny)
    rows = [Row.from_json(line) for line in read_results(path).lines] if path.exists() else []
    text(jobs[0], jobs[0].shapes[0][1])  # tokenizes once, before several processes read it
    with Writer(path, environment(), "convergence_seeds", append=True) as writer:

        def write(row: Row) -> None:
            writer.write(row)
            rows.append(row)
            console.print(f"seed {row.seed}, {describe(row)}, held-out loss {number(row.held_out_loss, '.4f')}")

        seeds.run(seeds.missing(jobs, rows), write, options.at_once, options.seconds, in_process=tiny)
    console.print(seeds.table(rows))
    left = seeds.missing(jobs, rows)
    console.print(f"{len(left)} of {len(jobs)} runs are missing" + ("; run the same command again" if left else ""))
    return not left


def read_lines(lines: Sequence[dict[str, Any]]) -> tuple[list[list[Curve]], list[Row]]:
    """The tiny models' curves, grouped by architecture and dtype, and the rows of the model on text."""
    groups: dict[tuple[str, str], list[Curve]] = {}
    for line in lines:
        if "curve" in line:
            curve = Curve(**line["curve"])
            groups.setdefault((curve.architecture, curve.dtype), []).append(curve)
    return list(groups.values()), [Row.from_json(line) for line in lines if "curve" not in line]


def table(found: Sequence[Sequence[Curve]]) -> Table:
    """The distances of each architecture's runs, in multiples of the noise."""
    runs = list(dict.fromkeys(curve.run for group in found for curve in group if curve.run not in STOCK))
    grid = Table(
        title=f"Losses of {len(found[0][0].losses)} steps: RMS difference from the stock model, as a multiple of the"
        " noise",
        title_justify="left",
    )
    for column in ("architecture", "dtype", "final loss", "noise", *runs):
        grid.add_column(column, justify="left" if column in ("architecture", "dtype") else "right")
    for group in found:
        grid.add_row(*cells(group, runs))
    return grid


def cells(group: Sequence[Curve], runs: Sequence[str]) -> list[str]:
    """The cells of one architecture's row."""
    noise, found = distances(group)
    multiples = [number(found[run] / noise if run in found else None, ".2f") for run in runs]
    return [group[0].architecture, group[0].dtype, f"{group[0].losses[-1]:.3f}", f"{noise:.1e}", *multiples]


def text_cells(rows: Sequence[Row]) -> list[list[str]]:
    """Rows of cells: a run, its last losses and its distance from the first run."""
    first = next((row for row in rows if row.losses), None)
    found = []
    for row in rows:
        name = name_of(row.parsed_arm) + (", rows reversed" if row.permute_rows else "")
        if not row.losses or first is None:
            found.append([name, row.status, "-"])
            continue
        last = row.losses[-20:]
        found.append([name, f"{sum(last) / len(last):.4f}", f"{distance(row.losses, first.losses):.1e}"])
    return found


def text_table(rows: Sequence[Row]) -> Table:
    grid = Table(title=f"The dimensions of {DIMS[rows[0].model].title}, on text", title_justify="left")
    for column in ("run", "loss, mean of the last 20 steps", "RMS difference from the first"):
        grid.add_column(column, justify="left" if column == "run" else "right")
    for row in text_cells(rows):
        grid.add_row(*row)
    return grid
