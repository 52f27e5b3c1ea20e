""":class:`LigerMonitor`: speed, utilisation, memory and data of a training."""

import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from rich.console import Console
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from typing_extensions import override

from liger_ops.arguments import check_bool, check_integer, check_path
from lightning_liger.hardware import find_gpu, measure_matmul_flops
from lightning_liger.host_copy import HostCopy
from lightning_liger.monitor.batches import BatchCounter, BatchTotals
from lightning_liger.monitor.clock import (
    FetchTimer,
    Lap,
    TrainingClock,
    peak_and_reserved_memory,
    readable_bytes,
    share_of_each,
)
from lightning_liger.monitor.flops import ModelFlops, model_flops
from lightning_liger.monitor.gradients import gradient_norm, joined_norm, sharded_units
from lightning_liger.monitor.page import page, table
from lightning_liger.monitor.tokens import Part, contents_of

_MIN_POINTS = 20
"""Of the plots, where the training is long enough: steps between two are fewer than asked for otherwise."""
_PATIENCE = 1.0
"""Seconds for which the numbers of a training that was interrupted may arrive."""
_LOSS = "train_loss_step"


@dataclass
class _OpenLap:
    """A lap whose numbers the device has not delivered yet."""

    step: int
    num_steps: int
    ends_step: bool
    """Whether it is logged: others end for a checkpoint or at the end of the warm-up."""
    lap: Lap
    known: list[float]
    """The first numbers of :class:`BatchTotals` and the seconds of waiting for data, if no device has added them up."""
    copied: HostCopy
    """What the device counted, after what is known of all ranks; then the scalars."""
    scalars: list[str]
    """The names of the last numbers in ``copied``: ``loss``, ``gradient_norm``."""
    gradient_norm: float | None
    """Where the host knows it."""
    peak_memory: int
    reserved_memory: int

    def has_arrived(self) -> bool:
        return self.copied.has_arrived() and self.lap.has_arrived()


@dataclass
class Totals:
    """Sums over a whole training, over resumed parts of it too."""

    batches: BatchTotals = field(default_factory=BatchTotals)
    num_steps: int = 0
    timed_steps: int = 0
    timed_tokens: float = 0.0
    timed_rows: float = 0.0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    """Summed over ranks, and divided by their number."""
    flops: float = 0.0
    peak_memory: int = 0
    reserved_memory: int = 0


class LigerMonitor(L.Callback):
    """Speed, utilisation, memory, gradient norm and data of a training: in the progress bar, in loggers, on a page.

    Each logger of the Trainer gets, every ``every_n_steps`` steps, for the steps since the last time:

    - ``monitor/tokens_per_second`` and ``monitor/tokens_per_second_per_device``, those of padding included, and
      ``monitor/step_seconds``; of batches without tokens, ``monitor/rows_per_second`` in their place
    - ``monitor/model_flops_utilization``: the share of the device's peak rate (:mod:`lightning_liger.hardware`, or
      measured) at which the FLOPs of the model are done; see :mod:`lightning_liger.monitor.flops` for the convention
    - ``monitor/data_wait_share``: of the time, during which the host waited for a batch
    - ``monitor/memory_peak_gib`` and ``monitor/memory_reserved_gib`` of the process of rank 0
    - ``monitor/gradient_norm`` of the last step, before clipping
    - ``monitor/padding_share`` of the tokens and ``monitor/ignored_share`` of the labels
    - ``monitor/tokens``: how many were trained on in all

    At the end, ``results`` has the same for the whole training, a table is printed (by
    :class:`~lightning_liger.TrainingSummary` if the Trainer has one), and a page with plots of the loss and of the
    throughput and a histogram of the lengths of sequences is written.

    The first steps and validation are left out of times. The device is never waited for: its numbers are read when they
    have arrived. Ranks that share batches (tensor and context parallelism) count once. Checkpoints keep all numbers,
    and so does an interruption (of several ranks, up to the last time).

    Args:
        every_n_steps: Optimizer steps between two times; by default the Trainer's ``log_every_n_steps``, or fewer in a
            training of less than 20 times as many.
        skip_steps: Steps at the start of each fit (compilation, allocation) that are left out of times.
        gradient_norm: Whether to take the norm of gradients, once every ``every_n_steps`` steps. What clipping or
            DeepSpeed has computed is not computed again.
        page: The HTML file to write, in the folder of the first logger if the path is relative, or in
            ``default_root_dir`` without one; a URL that fsspec knows, too. None writes none.

    Raises:
        TypeError: For an argument of another type.
        ValueError: If ``every_n_steps`` is below 1, ``skip_steps`` negative, or ``page`` empty.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        skip_steps: int = 2,
        gradient_norm: bool = True,
        page: str | None = "monitor.html",
    ) -> None:
        check_integer("every_n_steps", every_n_steps, at_least=1, optional=True)
        check_integer("skip_steps", skip_steps, at_least=0)
        check_bool("gradient_norm", gradient_norm)
        check_path("page", page, optional=True)
        self.every_n_steps = every_n_steps
        self.skip_steps = skip_steps
        self.gradient_norm = gradient_norm
        self.page = page
        self.results: dict[str, float] = {}
        self._clock = TrainingClock(skip_steps)
        self._totals = Totals()
        self._points: list[dict[str, float]] = []
        """What was logged, with ``step`` and, where there is one, ``loss``."""
        self._flops: ModelFlops | None = None
        self._peak_flops = 0.0
        self._device_name = ""
        self._shown: dict[str, str] = {}
        self._open: deque[_OpenLap] = deque()
        self._counter: BatchCounter | None = None
        self._page_path: str | None = None

    # The training

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device, untyped = trainer.strategy.root_device, cast(Any, trainer)  # Lightning sets some attributes elsewhere
        if trainer.global_step == 0:  # else it goes on
            self._totals, self._points = Totals(), []
        self._every = self.every_n_steps or untyped.log_every_n_steps or 1
        if self.every_n_steps is None:
            self._every = int(max(1, min(self._every, _planned_steps(trainer) / _MIN_POINTS)))
        self._clock.fit_starts()
        self._open.clear()
        self._last_step, self._num_steps, self._num_logged = trainer.global_step, 0, 0
        self._norms: dict[int, Tensor] = {}
        self._units: dict[Parameter, Any] | None = None
        self._batch: tuple[int, list[Part]] | None = None
        self._is_interrupted = self._has_counts = False
        self._flops = model_flops(trainer.strategy.model or pl_module)  # on all ranks, whose pairs are summed up
        self._device_name, self._peak_flops = _device(trainer)
        self._counter = BatchCounter(device, [window for _, window in self._flops.attention])
        untyped.profiler = self._fetches = FetchTimer(untyped.profiler)
        bar: Any = trainer.progress_bar_callback
        if bar is not None and trainer.is_global_zero:
            bar.get_metrics = partial(_metrics_of_bar, type(bar).get_metrics, bar, self._shown)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._clock.is_running:
            self._fetches.leave_out_last()
            if self._has_counts and self._clock.ends_warm_up(trainer):
                self._close_lap(trainer)  # what was not timed is no part of the first lap
        self._clock.batch_starts(trainer)
        self._batch = contents_of(batch)  # now: steps may take something out of the batch

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if not self.gradient_norm or (self._num_steps + 1) % self._every or _logs_norm(trainer):
            return
        if self._units is None:  # now: a validation before may have left units unsharded
            self._units = sharded_units(trainer.strategy.model or pl_module)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._norms[id(optimizer)] = gradient_norm(self._units, parameters, trainer.strategy.root_device)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._counter is not None
        if self._batch is not None:
            self._counter.add(*self._batch)
            self._batch, self._has_counts = None, True
        global_step = trainer.global_step
        if global_step != self._last_step:
            self._last_step = global_step
            self._num_steps += 1
            if self._num_steps % self._every == 0:
                self._close_lap(trainer, self._loss(trainer, outputs), ends_step=True)
        while self._open and self._open[0].has_arrived():
            self._finish_lap(trainer)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._counter is not None:
            self._clock.pause(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._clock.pause(trainer)
        if self._has_counts:
            self._close_lap(trainer)
        while self._open:
            self._finish_lap(trainer)

    # Laps

    def _loss(self, trainer: L.Trainer, outputs: Any) -> Tensor | None:
        """The loss of the last step, None if ``training_step`` returned none."""
        loss = trainer.callback_metrics.get(_LOSS)
        if loss is None and isinstance(outputs, dict) and isinstance(outputs.get("loss"), Tensor):
            loss = outputs["loss"]
            if trainer.lightning_module.automatic_optimization:  # has divided it
                loss = loss * trainer.accumulate_grad_batches
        return loss

    def _close_lap(self, trainer: L.Trainer, loss: Tensor | None = None, ends_step: bool = False) -> None:
        """Starts to bring what was counted to the host; every rank does so after the same batch."""
        assert self._counter is not None
        device = trainer.strategy.root_device
        waited, self._fetches.seconds = self._fetches.seconds, 0.0
        lap = self._clock.lap(trainer)
        known, counted = self._counter.take()
        known = [waited, *known]
        if trainer.world_size > 1:  # not by the strategy, whose barrier would wait for the device
            whole = torch.tensor(known, dtype=torch.float64).to(device, non_blocking=True)
            known, counted = [], torch.cat([whole, counted])
            dist.all_reduce(counted)
        norm = self._norm(trainer) if ends_step else None
        scalars = {"loss": loss} if loss is not None else {}
        if isinstance(norm, Tensor):
            scalars["gradient_norm"] = norm
        if scalars:  # one copy to the host, not several
            counted = torch.cat([counted, *(_number(value, device) for value in scalars.values())])
        peak, reserved = peak_and_reserved_memory(trainer.strategy)
        self._open.append(
            _OpenLap(
                step=trainer.global_step - 1,
                num_steps=self._num_steps - self._num_logged,
                ends_step=ends_step,
                lap=lap,
                known=known,
                copied=HostCopy(counted),
                scalars=list(scalars),
                gradient_norm=None if norm is None or isinstance(norm, Tensor) else float(norm),
                peak_memory=peak,
                reserved_memory=reserved,
            )
        )
        self._num_logged, self._has_counts = self._num_steps, False

    def _norm(self, trainer: L.Trainer) -> Tensor | float | None:
        """The norm of the gradients of the last step."""
        if not self.gradient_norm:
            return None
        if self._norms:
            norms, self._norms = list(self._norms.values()), {}
            return norms[0] if len(norms) == 1 else joined_norm(norms, trainer.strategy.root_device)
        engine = getattr(trainer.strategy, "deepspeed_engine", None)
        if engine is not None:
            norm: Tensor | float | None = engine.get_global_grad_norm()
            return norm
        return trainer.callback_metrics.get("grad_norm")

    def _finish_lap(self, trainer: L.Trainer) -> None:
        """Reads the oldest open lap, adds it to the totals, and logs it."""
        closed = self._open.popleft()
        assert self._flops is not None
        values = [*closed.known, *closed.copied.wait().tolist()]
        end = len(values) - len(closed.scalars)
        waited, scalars = values[0], dict(zip(closed.scalars, values[end:], strict=True))
        batches = BatchTotals.from_list(values[1:end], len(self._flops.attention))
        batches = batches.times(share_of_each(trainer))
        flops = self._flops.of_pairs(batches.num_tokens, batches.pairs)
        totals, seconds = self._totals, closed.lap.seconds()
        totals.batches = totals.batches + batches
        totals.batches.pairs = []  # of this model
        totals.num_steps += closed.num_steps
        totals.peak_memory = max(totals.peak_memory, closed.peak_memory)
        totals.reserved_memory = max(totals.reserved_memory, closed.reserved_memory)
        timed = Totals(batches, closed.num_steps, peak_memory=closed.peak_memory)
        timed.reserved_memory = closed.reserved_memory
        if seconds:
            timed.timed_steps, timed.timed_tokens, timed.timed_rows = (
                *(closed.num_steps, batches.num_tokens, batches.num_rows),
            )
            timed.seconds, timed.wait_seconds, timed.flops = seconds, waited / trainer.world_size, flops
            for name in ("timed_steps", "timed_tokens", "timed_rows", "seconds", "wait_seconds", "flops"):
                setattr(totals, name, getattr(totals, name) + getattr(timed, name))
        metrics = self._metrics(timed, trainer.world_size)
        metrics["tokens"] = totals.batches.num_tokens
        norm = scalars.pop("gradient_norm", closed.gradient_norm)
        if norm is not None:
            metrics["gradient_norm"] = norm
        if closed.ends_step:
            self._log(trainer, closed.step, metrics)
            self._points.append({"step": closed.step, **scalars, **metrics})

    def _metrics(self, totals: Totals, world_size: int) -> dict[str, float]:
        """The numbers of some laps by the names under which they are logged."""
        found: dict[str, float] = {}
        batches = totals.batches
        if totals.seconds:
            unit, number = ("tokens", totals.timed_tokens) if batches.num_tokens else ("rows", totals.timed_rows)
            found[f"{unit}_per_second"] = number / totals.seconds
            found[f"{unit}_per_second_per_device"] = number / totals.seconds / world_size
            if totals.timed_steps:
                found["step_seconds"] = totals.seconds / totals.timed_steps
            if batches.num_tokens and totals.flops:
                found["model_flops_utilization"] = totals.flops / totals.seconds / (world_size * self._peak_flops)
            found["data_wait_share"] = min(1.0, totals.wait_seconds / totals.seconds)
        found["memory_peak_gib"] = totals.peak_memory / 2**30
        if totals.reserved_memory:
            found["memory_reserved_gib"] = totals.reserved_memory / 2**30
        if batches.num_tokens:
            found["padding_share"] = batches.num_padding / batches.num_tokens
        if batches.num_labels:
            found["ignored_share"] = batches.num_ignored / batches.num_labels
        return found

    def _log(self, trainer: L.Trainer, step: int, metrics: dict[str, float]) -> None:
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.log_metrics({f"monitor/{name}": value for name, value in metrics.items()}, step=step)
        for unit, short in (("tokens", "tok/s"), ("rows", "rows/s")):
            if f"{unit}_per_second" in metrics:
                self._shown[short] = _short(metrics[f"{unit}_per_second"])
        if "model_flops_utilization" in metrics:
            self._shown["MFU"] = f"{metrics['model_flops_utilization']:.1%}"

    # The end

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = trainer.log_dir or trainer.default_root_dir  # asks rank 0, so on all ranks
        if self._counter is None:  # there was nothing left to train
            return
        self._end(trainer, folder)
        if not self._totals.batches.num_tokens and self._totals.batches.num_rows:
            rank_zero_info("LigerMonitor: the batches have no input_ids, so rows are counted, not tokens.")

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._is_interrupted = True  # other ranks may not be here
        if self._counter is None:
            return
        with _telling("lost the last numbers"):
            self._finish_arrived(trainer)
        with _telling("could not end"):
            loggers = trainer.loggers
            folder = getattr(loggers[0], "log_dir", None) or loggers[0].save_dir if loggers else None
            self._end(trainer, folder or trainer.default_root_dir)

    def _finish_arrived(self, trainer: L.Trainer) -> None:
        """Finishes what the device delivers in a moment: it may be broken, and is not waited for."""
        if trainer.world_size == 1 and self._has_counts:  # ranks would have to add up their numbers
            self._clock.pause(trainer)
            self._close_lap(trainer)
        patience = time.monotonic() + _PATIENCE
        while self._open:
            if self._open[0].has_arrived():
                self._finish_lap(trainer)
            elif time.monotonic() < patience:
                time.sleep(0.01)
            else:
                break

    def _end(self, trainer: L.Trainer, folder: str) -> None:
        untyped = cast(Any, trainer)
        if isinstance(untyped.profiler, FetchTimer):
            untyped.profiler = untyped.profiler.profiler
        bar = trainer.progress_bar_callback
        if bar is not None:
            vars(bar).pop("get_metrics", None)
        totals = self._totals
        self.results = {
            "steps": totals.num_steps,
            "tokens": totals.batches.num_tokens,
            "rows": totals.batches.num_rows,
            "seconds": totals.seconds,
            **self._metrics(totals, trainer.world_size),
        }
        self._counter = None
        fast_dev_run: bool = trainer.fast_dev_run  # type: ignore[attr-defined]  # set outside of Trainer.__init__
        if self.page is not None and trainer.is_global_zero and totals.num_steps and not fast_dev_run:
            title = f"{type(trainer.lightning_module).__name__}, {trainer.world_size} x {self._device_name}"
            path = str(self.page) if "://" in str(self.page) else os.path.join(folder, self.page)
            with _telling(f"could not write {path}"):
                self._write_page(path, title)

    def _write_page(self, path: str, title: str) -> None:
        """Writes to a local path or a URL that fsspec knows."""
        files = get_filesystem(path)
        files.makedirs(os.path.dirname(path), exist_ok=True)
        text = page(title, self.rows(), self._points, self._totals.batches.lengths)
        with files.open(path, "w", encoding="utf-8") as file:
            file.write(text)
        self._page_path = path

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Not in on_fit_end, when a progress bar still owns the terminal.
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set outside of Trainer.__init__
        is_shown = any(getattr(callback, "shows_monitor", False) for callback in callbacks)
        if stage == "fit" and self.results and trainer.is_global_zero and not is_shown:
            Console().print(table("Monitor", self.rows()))

    def rows(self) -> dict[str, str]:
        """The rows of the table and of the page: what each number is, and the number with its unit."""
        return dict(self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        results = self.results
        yield "Steps", f"{results['steps']:,.0f}"
        for unit in ("tokens", "rows"):
            if speed := results.get(f"{unit}_per_second"):
                each = results[f"{unit}_per_second_per_device"]
                yield f"{unit.title()}/s", f"{speed:,.0f}" + ("" if each == speed else f" ({each:,.0f} a device)")
        if results["tokens"]:
            yield "Tokens", f"{results['tokens']:,.0f}"
        if "step_seconds" in results:
            yield "Time of a step", f"{results['step_seconds'] * 1000:,.4g} ms"
        if "model_flops_utilization" in results:
            peak = f"{self._peak_flops / 1e12:,.4g} TFLOP/s"
            yield "Model FLOPs utilisation", f"{results['model_flops_utilization']:.1%} of {peak}"
        if "data_wait_share" in results:
            yield "Waiting for data", f"{results['data_wait_share']:.1%} of the time"
        yield "Peak memory", readable_bytes(results["memory_peak_gib"] * 2**30) + " a process"
        if "memory_reserved_gib" in results:
            yield "Reserved memory", readable_bytes(results["memory_reserved_gib"] * 2**30) + " a process"
        norms = [point["gradient_norm"] for point in self._points if "gradient_norm" in point]
        if norms:
            yield "Gradient norm", f"{norms[-1]:.4g} at the end, {max(norms):.4g} at most"
        if "padding_share" in results:
            yield "Padding", f"{results['padding_share']:.1%} of the tokens"
        if "ignored_share" in results:
            yield "Ignored labels", f"{results['ignored_share']:.1%} of the labels"
        if self._page_path is not None:
            path = Path(self._page_path).resolve()
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            yield "Page", self._page_path if "://" in self._page_path else str(shown)

    # Checkpoints

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._counter is not None and not self._is_interrupted:
            if self._has_counts:
                self._close_lap(trainer)
            while self._open:
                self._finish_lap(trainer)
        if "callbacks" in checkpoint:
            checkpoint["callbacks"][self.state_key] = self.state_dict()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"totals": asdict(self._totals), "points": [dict(point) for point in self._points]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        totals = dict(state_dict["totals"])
        self._totals = Totals(**{**totals, "batches": BatchTotals(**totals["batches"])})
        self._points = [dict(point) for point in state_dict["points"]]


def _device(trainer: L.Trainer) -> tuple[str, float]:
    """The name of the device of rank 0 and its peak rate in FLOP/s, measured if it is not in the table."""
    device = trainer.strategy.root_device
    precision = str(trainer.precision)
    dtype = next((dtype for key, dtype in _DTYPES.items() if precision.startswith(key)), None)
    if dtype is None:  # float32 for all that has no other dtype: weights may have been loaded in 16 bits
        dtype = _main_dtype(trainer.lightning_module)
    if not trainer.is_global_zero:
        return "", 1.0
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = find_gpu(properties.name, properties.total_memory)
        if gpu is not None and dtype != torch.float64:
            return gpu.name, gpu.peak_flops(dtype)
        return properties.name, measure_matmul_flops(device, dtype)
    return f"{device.type} process", measure_matmul_flops(device, dtype)


def _main_dtype(module: torch.nn.Module) -> torch.dtype:
    """The floating-point dtype that most numbers of a module's weights have."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        if parameter.is_floating_point() and not is_lazy(parameter):
            sizes[parameter.dtype] += parameter.numel()
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64, "transformer-engine": torch.bfloat16}


def _planned_steps(trainer: L.Trainer) -> float:
    """The optimizer steps of the whole fit, as far as the Trainer's arguments tell."""
    steps = trainer.num_training_batches / trainer.accumulate_grad_batches * (trainer.max_epochs or 1)
    limits = [limit for limit in (trainer.max_steps, steps) if limit > 0]
    return min(limits, default=float("inf"))


def _logs_norm(trainer: L.Trainer) -> bool:
    """Whether clipping takes the norm anyway, and a strategy of this package logs it, or DeepSpeed does."""
    if getattr(trainer.strategy, "deepspeed_engine", None) is not None:
        return True
    by_norm = str(trainer.gradient_clip_algorithm or "norm").endswith("norm") and (trainer.gradient_clip_val or 0) > 0
    return by_norm and (
        hasattr(trainer.strategy, "on_nonfinite_grad") or hasattr(trainer.precision_plugin, "on_nonfinite_grad")
    )


def _number(value: Tensor, device: torch.device) -> Tensor:
    """The mean of a tensor, ``[1]`` in float64 on the device."""
    value = value.detach().to(device, torch.float64, non_blocking=True)
    return value.view(1) if value.numel() == 1 else value.mean().view(1)


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """A context whose exception is told in one line: a training neither ends with it, nor with another than its own."""
    try:
        yield
    except Exception as error:  # of a broken device, or of any file system
        lines = str(error).splitlines()
        rank_zero_warn(f"LigerMonitor {what}: {type(error).__name__}{': ' if lines else ''}{''.join(lines[:1])}")


def _metrics_of_bar(
    get_metrics: Any, bar: Any, shown: dict[str, str], trainer: L.Trainer, pl_module: L.LightningModule
) -> dict[str, Any]:
    return {**get_metrics(bar, trainer, pl_module), **shown}


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
