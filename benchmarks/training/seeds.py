"""Losses of arms over several seeds, and whether they are equal: part of ``convergence``.

Each seed has its own weights and its own order of the text. Arms are compared seed by seed; the first one also trains
with the rows of each batch reversed, which changes nothing but the order of sums. An arm is equal if the 95% interval
of its mean difference (Student's t) lies within ``MARGIN`` of the loss.
"""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import torch
from rich.table import Table

from benchmarks.training.arms import Arm
from benchmarks.training.job import OK, Job, Row
from benchmarks.training.processes import run_jobs
from benchmarks.training.train import name_of, number

MARGIN = 0.005
"""As a share of the loss."""
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom; the last one is used for more too."""


class Difference(NamedTuple):
    """The mean difference of one arm from another over seeds, and half of its 95% interval."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Difference":
        count = len(differences)
        if count < 2:
            return cls(statistics.fmean(differences), math.inf)
        error = statistics.stdev(differences) / math.sqrt(count)
        return cls(statistics.fmean(differences), _T[min(count - 1, len(_T)) - 1] * error)

    def lies_within(self, margin: float) -> bool:
        return abs(self.mean) + self.half_width <= margin


def make_jobs(arms: Sequence[Arm], model: str, num_seeds: int, steps: int, cache: str, tiny: bool) -> list[Job]:
    """Jobs of each arm, seed by seed; the last ones are the first arm's with the rows of each batch reversed."""
    jobs, reversed_jobs = [], []
    for seed in range(num_seeds):
        mine = [
            Job(
                model=model,
                precision="bf16-mixed",  # weights that are trained in bfloat16 lose small steps, which adds noise
                arm=str(arm),
                shapes=((2, 32) if tiny else (8, 1024) if model == "llama_120m" else (4, 512),),
                warm_up=0,
                steps=steps,
                learning_rate=6e-4 if model == "llama_120m" else 3e-4,
                learning_rate_warm_up=max(1, steps // 5),
                pretrains=True,  # without, runs that differ in rounding alone differ by more than the margin
                text_cache=cache,
                # Larger than what a run reads: losses of held-out text differ by more where text is read twice.
                text_package="pytest" if tiny else "torch",
                vocab_size=512 if tiny else 16384,
                every_linear_fp8=True,
                held_out_rows=4 if tiny else 512,
                tiny=tiny,
                seed=100 * seed,  # orders of text follow from the seed and the epoch
            )
            for arm in arms
        ]
        jobs += mine
        reversed_jobs.append(dataclasses.replace(mine[0], permute_rows=True))
    return jobs + reversed_jobs


def missing(jobs: Sequence[Job], rows: Sequence[Row]) -> list[Job]:
    """The jobs that have no result yet."""
    done = {(row.arm, row.permute_rows, row.seed) for row in rows if row.status == OK}
    return [job for job in jobs if (job.arm, job.permute_rows, job.seed) not in done]


def run(jobs: Sequence[Job], write: Callable[[Row], None], at_once: int, seconds: float, in_process: bool) -> None:
    """Trains ``at_once`` jobs at a time on each GPU, and starts none that would not end within ``seconds``."""
    start, longest = time.monotonic(), 0.0
    free: SimpleQueue[str] = SimpleQueue()
    every = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    for device in every.split(",") * at_once:
        free.put(device)

    def train(job: Job) -> None:
        nonlocal longest
        device, begin = free.get(), time.monotonic()
        try:
            left = start + seconds - begin
            if left > 1.1 * longest:
                for row in run_jobs([job], in_process=in_process, timeout=left, device=device):
                    write(row)
                longest = max(longest, time.monotonic() - begin)
        finally:
            free.put(device)

    with ThreadPoolExecutor(1 if in_process else free.qsize()) as threads:
        list(threads.map(train, jobs))


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Rows of cells: a run, its number of seeds, its held-out loss and its difference from the first run."""
    by_run: dict[tuple[str, bool], dict[int, float]] = {}
    for row in rows:
        if row.held_out_loss is not None:
            by_run.setdefault((row.arm, row.permute_rows), {})[row.seed] = row.held_out_loss
    compared = {row.arm for row in rows if row.permute_rows}
    by_run = dict(sorted(by_run.items(), key=lambda run: (run[0][0] not in compared, run[0][1])))
    first = next(iter(by_run.values()), {})
    found = []
    for (arm, is_reversed), losses in by_run.items():
        name = name_of(Arm.parse(arm)) + (", rows reversed" if is_reversed else "")
        mean = statistics.fmean(losses.values())
        start = [name, str(len(losses)), f"{mean:.4f}"]
        pairs = [losses[seed] - first[seed] for seed in losses if seed in first]
        if losses is first or not pairs:
            found.append([*start, "-", "-", "-"])
            continue
        difference, loss = Difference.of(pairs), statistics.fmean(first.values())
        interval = f"{difference.mean:+.4f} ± {number(difference.half_width, '.4f')}"
        share = f"{difference.mean / loss:+.2%} ± {difference.half_width / loss:.2%}"
        found.append([*start, interval, share, "yes" if difference.lies_within(MARGIN * loss) else "no"])
    return found


HEADER = ("run", "seeds", "held-out loss", "difference, 95% interval", "of the loss", f"within {MARGIN:.1%}")


def table(rows: Sequence[Row]) -> Table:
    grid = Table(title="Held-out loss on source code: differences from the first, by seed", title_justify="left")
    for column in HEADER:
        grid.add_column(column, justify="left" if column == "run" else "right")
    for row in cells(rows):
        grid.add_row(*row)
    return grid
