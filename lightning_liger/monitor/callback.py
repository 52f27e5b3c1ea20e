""":class:`LigerMonitor`: speed, utilization, memory and data of a training run."""

import functools
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from liger_ops.arguments import check_bool, check_integer, check_path
from liger_ops.optim.gradients import joined_norm
from lightning_liger.hardware import find_gpu, measure_matmul_flops
from lightning_liger.host_copy import HostCopy
from lightning_liger.monitor.batches import COUNTED, LENGTH_EDGES, BatchCounter, Part, contents_of
from lightning_liger.monitor.clock import FetchTimer, Spans, TrainingClock, peak_memory, readable_bytes
from lightning_liger.monitor.experts import ExpertLoads, find_experts
from lightning_liger.monitor.flops import ModelFlops, counted_part, float8_flops, model_flops
from lightning_liger.monitor.page import page, short, table
from lightning_liger.patching.float8 import converted_layers, share_of
from lightning_liger.strategies.parts.gradient_norm import gradient_norm

_MIN_POINTS = 20
"""Of the plots, where the training run is long enough: steps between two are fewer than asked for otherwise."""
_PATIENCE = 1.0
"""Seconds for which the numbers of an interrupted run may arrive."""
_SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_second": ("tok/s", short),
    "rows_per_second": ("rows/s", short),
    "model_flops_utilization": ("MFU", "{:.1%}".format),
}
"""What the progress bar shows."""
_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64, "transformer-engine": torch.bfloat16}


Totals = defaultdict[str, float]
"""Sums over steps, and the most of memory; of a training run also over resumed parts of it. See ``_finish_lap``."""


class _Lap(NamedTuple):
    """Some steps whose numbers the device has not delivered yet."""

    step: int
    ends_step: bool
    """Whether it is logged: others end with the warm-up or for a checkpoint."""
    totals: Totals
    spans: Spans
    copied: HostCopy
    """Seconds of waiting for data and the numbers of :class:`BatchCounter`, added up over all ranks; then scalars."""
    scalars: list[str]


class LigerMonitor(L.Callback):
    """Speed, utilization, memory, gradient norm and data of a training run: in the progress bar, in loggers, on a page.

    Each logger of the Trainer gets ``monitor/NAME``, every ``every_n_steps`` steps, for the steps since the last one:

    - ``tokens_per_second`` and ``tokens_per_second_per_device``, those of padding included, or ``rows_per_second`` of
      batches without tokens; ``step_seconds``
    - ``model_flops_utilization``: the share of the device's peak rate (:mod:`lightning_liger.hardware`, or measured) at
      which the FLOPs of the model are done; see :mod:`lightning_liger.monitor.flops` for the convention. Those of
      products in float8 count against the peak in float8
    - ``fp8_share`` of the FLOPs of linear layers that are converted to float8, which ran in it
    - ``data_wait_share`` of the time, during which the host waited for a batch
    - ``memory_peak_gib`` and ``memory_reserved_gib`` of the process of rank 0
    - ``gradient_norm`` of the last step, before clipping
    - ``expert_imbalance`` of a mixture of experts, in the last step: tokens of the busiest expert of a layer over their
      mean, of the layer where that is largest; ``idle_experts_share`` of all experts, which had no token
    - ``padding_share`` of the tokens, ``ignored_share`` of the labels, ``tokens`` in all

    ``results`` has these for the whole run, and ``processes``, ``peak_memory_bytes``, ``logits_bytes_avoided``
    (logits that were never allocated), ``num_fused_losses``, ``whole_logits`` and the metrics of the Trainer. A table
    of replacements is printed at the start, one of the results at the end, and a page is written with plots of them.

    The first steps and validation are left out of times. The device is never waited for: its numbers are read when they
    have arrived. Ranks that share batches (tensor and context parallelism) count once. Checkpoints keep all numbers,
    and so does an interruption (of several ranks, up to the last time). Of several monitors of a Trainer the first one
    with a page measures.

    Args:
        every_n_steps: Optimizer steps between two reports; by default the Trainer's ``log_every_n_steps``, or fewer in
            a run of less than 20 times as many.
        skip_steps: Steps at the start of each fit (compilation, allocation) that are excluded from times.
        gradient_norm: Whether to compute the gradient norm, every ``every_n_steps`` steps. A norm that clipping or
            DeepSpeed has computed is reused.
        page: The HTML file to write, in the folder of the first logger if the path is relative, or in
            ``default_root_dir`` without one; or a URL that fsspec supports. None writes none.

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
        self.every_n_steps, self.skip_steps = every_n_steps, skip_steps
        self.gradient_norm, self.page = gradient_norm, page
        self.results: dict[str, float] = {}
        self.points: list[dict[str, float]] = []
        """What was logged, with ``step`` and, where there is one, ``loss``."""
        self._totals = Totals(int)
        self._flops: ModelFlops | None = None
        self._peak_flops = self._float8_peak_flops = 0.0
        self._converted: list[Any] = []
        self._shown: dict[str, str] = {}
        self._open: deque[_Lap] = deque()
        self._counter: BatchCounter | None = None
        self._experts: dict[nn.Module, int] = {}
        self._rows: dict[str, str] = {}

    # The training

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        monitors = [each for each in cast(Any, trainer).callbacks if isinstance(each, LigerMonitor)]
        self._is_first = self is max(monitors, key=lambda monitor: monitor.page is not None)
        if stage != "fit" or not self._is_first:
            return
        self._flops, self._experts = None, {}
        # Before the strategy wraps the module, after which shapes are not known.
        after_configure_model(pl_module, functools.partial(self._count_flops, pl_module))

    def _count_flops(self, module: L.LightningModule) -> None:
        if next(module.parameters(), None) is not None:  # else it may make its model in its own setup
            self._flops, self._experts = model_flops(module), find_experts(counted_part(module))

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._counter, self.results = None, {}
        if self._is_first and trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)
        if self._is_first and trainer.is_global_zero:
            owners = (trainer.strategy, *cast(Any, trainer).callbacks)  # set outside of Trainer.__init__
            reports = (getattr(each, "patch_report", None) for each in owners)
            Console().print(next(filter(None, reports), "lightning-liger: no kernels were applied"))

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._is_first:
            return
        device, untyped = trainer.strategy.root_device, cast(Any, trainer)  # Lightning sets some attributes elsewhere
        if trainer.global_step == 0:  # else it goes on
            self._totals, self.points = Totals(int), []
        steps = trainer.num_training_batches / trainer.accumulate_grad_batches * (trainer.max_epochs or 1)
        planned = min((limit for limit in (trainer.max_steps, steps) if limit > 0), default=math.inf)
        self._every = self.every_n_steps or max(1, int(min(untyped.log_every_n_steps or 1, planned / _MIN_POINTS)))
        self._clock = TrainingClock(device, self.skip_steps * trainer.accumulate_grad_batches)
        self._open.clear()
        self._last_step, self._num_steps, self._num_logged = trainer.global_step, 0, 0
        self._norms: dict[int, Tensor] = {}
        self._batch: tuple[int, list[Part]] = 0, []
        self._is_interrupted = self._has_counts = False
        self._flops = self._flops or model_flops(pl_module)  # on all ranks, whose pairs are summed up
        self._loads = ExpertLoads(self._experts or find_experts(counted_part(pl_module)), device)
        self._device_name, self._peak_flops, self._float8_peak_flops = _device(trainer)
        self._converted = converted_layers(pl_module)
        self._counter = BatchCounter(device, [window for _, window in self._flops.attention])
        self._fetches = FetchTimer(untyped.profiler)
        bar: Any = trainer.progress_bar_callback
        if bar is not None and trainer.is_global_zero:
            get_metrics, shown = bar.get_metrics, self._shown
            bar.get_metrics = lambda *args: {**get_metrics(*args), **shown}

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: Any) -> None:
        if self._counter is None:
            return
        if self._clock.start is None:
            self._fetches.seconds -= self._fetches.last
            if self._has_counts and self._clock.skip_batches == 0:
                self._close_lap(trainer)  # what was not timed is no part of the first lap
        self._clock.batch_starts()
        self._loads.is_counting = (self._num_steps + 1) % self._every == 0
        self._batch = contents_of(batch)  # now: steps may take something out of the batch

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        ends_lap = self._counter is not None and (self._num_steps + 1) % self._every == 0
        if ends_lap and self.gradient_norm and not _logs_norm(trainer):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            model = trainer.strategy.model or pl_module
            self._norms[id(optimizer)] = gradient_norm(model, parameters, trainer.strategy.root_device)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        if self._counter is None:
            return
        self._loads.is_counting = False
        self._counter.add(*self._batch)
        self._has_counts = True
        if trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self._num_steps += 1
            if self._num_steps % self._every == 0:
                self._close_lap(trainer, _loss(trainer, outputs), ends_step=True)
        self._finish_arrived(trainer)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._counter is not None:
            self._clock.pause()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._counter is not None:
            self._finish_all(trainer)

    # Laps

    def _close_lap(self, trainer: L.Trainer, loss: Tensor | None = None, ends_step: bool = False) -> None:
        """Starts to bring what was counted to the host; every rank does so after the same batch."""
        assert self._counter is not None
        options: Any = {"device": trainer.strategy.root_device, "dtype": torch.float64, "non_blocking": True}
        waited = torch.tensor([self._fetches.seconds], dtype=torch.float64).to(**options)
        self._fetches.seconds = 0.0
        counts = self._counter.take()
        loads = self._loads.take() if ends_step else counts[:0]  # those of a step that goes on stay
        counted = torch.cat([waited, counts, loads])
        if trainer.world_size > 1:  # not by the strategy, whose barrier would wait for the device
            dist.all_reduce(counted)
        counted, loads = counted.split([1 + len(counts), len(loads)])
        given: dict[str, Any] = {"loss": loss}
        if ends_step:
            given |= {"gradient_norm": self._norm(trainer), **self._loads.imbalance(loads)}
        scalars = {name: torch.as_tensor(value).detach() for name, value in given.items() if value is not None}
        numbers = {name: value.to(**options).mean().view(1) for name, value in scalars.items()}
        peak, reserved = peak_memory(trainer.strategy)
        totals = Totals(int, steps=self._num_steps - self._num_logged, peak_memory=peak, reserved_memory=reserved)
        spans = self._clock.lap()  # which the device has reached when the copy has arrived
        copied = HostCopy(torch.cat([counted, *numbers.values()]))  # one copy to the host, not several
        self._open.append(_Lap(trainer.global_step - 1, ends_step, totals, spans, copied, list(numbers)))
        self._num_logged, self._has_counts = self._num_steps, False

    def _norm(self, trainer: L.Trainer) -> Any:
        """The norm of the gradients of the last step."""
        if not self.gradient_norm:
            return None
        if self._norms:
            norms, self._norms = list(self._norms.values()), {}
            return joined_norm(norms)
        engine = getattr(trainer.strategy, "deepspeed_engine", None)
        return trainer.callback_metrics.get("grad_norm") if engine is None else engine.get_global_grad_norm()

    def _finish_lap(self, trainer: L.Trainer) -> None:
        """Reads the oldest open lap, adds it to the totals, and logs it."""
        lap = self._open.popleft()
        assert self._flops is not None
        (waited, *copied), totals = lap.copied.wait().tolist(), lap.totals
        num_counts = len(copied) - len(lap.scalars)
        # Tensor- and context-parallel ranks count the same batches.
        sampler = trainer.distributed_sampler_kwargs or {"num_replicas": trainer.world_size}
        counts = [count * (sampler["num_replicas"] / trainer.world_size) for count in copied[:num_counts]]
        totals |= zip(COUNTED, counts, strict=False)
        pairs, lengths = counts[len(COUNTED) : -len(LENGTH_EDGES)], counts[-len(LENGTH_EDGES) :]
        totals |= {f"length_{edge}": count for edge, count in zip(LENGTH_EDGES, lengths, strict=True)}
        totals["seconds"] = sum(end.seconds_since(start) for start, end in lap.spans)
        if totals["seconds"]:
            totals |= {f"timed_{name}": totals[name] for name in ("steps", "tokens", "rows")}
            totals["wait_seconds"] = waited / trainer.world_size  # of a rank
            share = share_of(self._converted) or 0.0
            in_float8 = totals["tokens"] * share * float8_flops(self._converted)
            # Counted as those that the device does in the same time outside of float8.
            saved = in_float8 * (1 - self._peak_flops / self._float8_peak_flops)
            totals["flops"] = self._flops.for_pairs(totals["tokens"], pairs) - saved
        for name, value in totals.items():
            before = self._totals[name]
            self._totals[name] = max(before, value) if name.endswith("memory") else before + value
        if not lap.ends_step:
            return
        point = dict(zip(lap.scalars, copied[num_counts:], strict=True))
        metrics = {**self._metrics(totals, trainer.world_size), "tokens": self._totals["tokens"], **point}
        self.points.append({"step": lap.step, **metrics})
        metrics.pop("loss", None)
        if trainer.is_global_zero:
            named = {f"monitor/{name}": value for name, value in metrics.items()}
            if self._totals["tokens"]:
                named["num_tokens"] = self._totals["tokens"] - self._totals["padding"]  # as TRL counts
            for logger in trainer.loggers:
                logger.log_metrics(named, step=lap.step)
            for name, (title, text) in _SHOWN.items():
                if name in metrics:
                    self._shown[title] = text(metrics[name])

    def _finish_arrived(self, trainer: L.Trainer) -> None:
        while self._open and self._open[0].copied.has_arrived():
            self._finish_lap(trainer)

    def _finish_all(self, trainer: L.Trainer) -> None:
        """Waits for all numbers so far."""
        if self._has_counts:
            self._close_lap(trainer)
        while self._open:
            self._finish_lap(trainer)

    def _metrics(self, totals: Totals, world_size: int) -> dict[str, float]:
        """The numbers of some laps by the names under which they are logged."""
        unit, seconds = "tokens" if totals["tokens"] else "rows", totals["seconds"]
        flops = self._peak_flops if totals["tokens"] and totals["flops"] else 0
        share = share_of(self._converted)
        shares = {  # numerator and denominator, without which a number is left out
            f"{unit}_per_second": (totals[f"timed_{unit}"], seconds),
            f"{unit}_per_second_per_device": (totals[f"timed_{unit}"], seconds * world_size),
            "step_seconds": (seconds, totals["timed_steps"]),
            "model_flops_utilization": (totals["flops"], seconds * world_size * flops),
            "fp8_share": (share or 0.0, share is not None),
            "data_wait_share": (min(seconds, totals["wait_seconds"]), seconds),
            "memory_peak_gib": (totals["peak_memory"], 2**30),
            "memory_reserved_gib": (totals["reserved_memory"], 2**30 if totals["reserved_memory"] else 0),
            "padding_share": (totals["padding"], totals["tokens"]),
            "ignored_share": (totals["ignored"], totals["labels"]),
        }
        return {name: above / below for name, (above, below) in shares.items() if below}

    # The end

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = trainer.log_dir or trainer.default_root_dir  # asks rank 0, so on all ranks
        if self._counter is not None:  # else there was nothing left to train
            self._end(trainer, folder)
            if self._totals["rows"] and not self._totals["tokens"]:
                rank_zero_info("LigerMonitor: the batches have no input_ids, so rows are counted, not tokens.")

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._is_interrupted = True  # other ranks may not be here
        if self._counter is None:
            return
        with _telling("lost the last metrics"):  # of a device that may be broken, and is not waited for
            if trainer.world_size == 1 and self._has_counts:  # ranks would have to add up their numbers
                self._close_lap(trainer)
            patience = time.monotonic() + _PATIENCE
            while self._open and time.monotonic() < patience:
                self._finish_arrived(trainer)
        with _telling("could not finish"):
            logger: Any = next(iter(trainer.loggers), None)
            folder = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
            self._end(trainer, folder or trainer.default_root_dir)

    def _end(self, trainer: L.Trainer, folder: str) -> None:
        self._fetches.remove()
        self._loads.remove()
        self._experts = {}
        vars(trainer.progress_bar_callback or self).pop("get_metrics", None)
        totals, self._counter = self._totals, None
        owners = [vars(module) for module in trainer.lightning_module.modules()]
        counters = [attributes["fusion_counters"] for attributes in owners if "fusion_counters" in attributes]
        avoided = torch.tensor(float(sum(each.bytes_avoided for each in counters)), dtype=torch.float64)
        if not self._is_interrupted:
            avoided = trainer.strategy.reduce(avoided.to(trainer.strategy.root_device), reduce_op="sum")
        self.results = {
            **{name: totals[name] for name in ("steps", "tokens", "rows", "seconds")},
            "processes": trainer.world_size,
            "peak_memory_bytes": totals["peak_memory"],
            "logits_bytes_avoided": float(avoided),
            "num_fused_losses": sum(each.num_losses for each in counters),
            "whole_logits": sum(each.num_materialized for each in counters),
            **{name: float(value) for name, value in trainer.callback_metrics.items()},
            **self._metrics(totals, trainer.world_size),
        }
        self._rows = dict(self._make_rows(trainer))
        is_try = cast(Any, trainer).fast_dev_run  # set outside of Trainer.__init__
        if self.page is None or not trainer.is_global_zero or not totals["steps"] or is_try:
            return
        title = f"{type(trainer.lightning_module).__name__}, {trainer.world_size} x {self._device_name}"
        path = str(self.page) if "://" in str(self.page) else os.path.join(folder, self.page)
        with _telling(f"could not write {path}"):
            files = get_filesystem(path)
            files.makedirs(os.path.dirname(path), exist_ok=True)
            with files.open(path, "w", encoding="utf-8") as file:
                lengths = [totals[f"length_{edge}"] for edge in LENGTH_EDGES]
                file.write(page(title, self._rows, self.points, lengths))
            self._rows["Page"] = path if "://" in path else os.path.relpath(path)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        vars(pl_module).pop("configure_model", None)
        # Not in on_fit_end, when a progress bar still owns the terminal.
        if stage == "fit" and self.results and trainer.is_global_zero:
            Console().print(table("Training summary", self._rows))

    def rows(self) -> dict[str, str]:
        """The rows of the table and of the page: what each number is, and the number with its unit."""
        return dict(self._rows)

    def _make_rows(self, trainer: L.Trainer) -> Iterator[tuple[str, str]]:
        results, device, world_size = self.results, trainer.strategy.root_device.type, trainer.world_size
        yield "Steps", f"{results['steps']:,.0f} on {world_size} {device} process{'es' if world_size > 1 else ''}"
        unit = "rows" if results["rows"] and not results["tokens"] else "tokens"
        speed = results.get(f"{unit}_per_second")
        per_device = f" ({speed / world_size:,.0f} per device)" if world_size > 1 and speed else ""
        yield f"{unit.title()}/s", f"{speed:,.0f}{per_device}" if speed else "too few steps"
        for name, value in results.items():
            stage, _, rest = name.partition("_")
            if title := {"train": "Training", "val": "Validation"}.get(stage):
                yield f"{title} {'final loss' if rest == 'loss_step' else rest}", f"{value:.4g}"
        gpu = "GPU " if device == "cuda" else ""
        yield f"Peak {gpu}memory", f"{readable_bytes(results['peak_memory_bytes'])} per process"
        if "memory_reserved_gib" in results:
            yield "Reserved memory", f"{readable_bytes(results['memory_reserved_gib'] * 2**30)} per process"
        if avoided := results["logits_bytes_avoided"]:  # not where each loss took one chunk, or none are counted
            bytes_per_loss = readable_bytes(avoided / results["num_fused_losses"] / world_size)
            yield "Logits never allocated", f"{readable_bytes(avoided)} in total, {bytes_per_loss} per loss"
        if plan := getattr(trainer.strategy, "activation_plan", ""):
            yield "Activations", plan
        if results["tokens"]:
            yield "Tokens", f"{results['tokens']:,.0f}"
        if norms := [point["gradient_norm"] for point in self.points if "gradient_norm" in point]:
            yield "Gradient norm", f"{norms[-1]:.4g} final, {max(norms):.4g} max"
        if loads := [point for point in self.points if "expert_imbalance" in point]:
            last, most = loads[-1], max(point["expert_imbalance"] for point in loads)
            yield (
                "Busiest expert",
                f"{last['expert_imbalance']:.3g} times the mean, {most:.3g} max;"
                f" {last['idle_experts_share']:.1%} of the experts idle",
            )
        peak_format = f"{{:.1%}} of {self._peak_flops / 1e12:,.4g} TFLOP/s"
        if self._converted:
            peak_format += f", of {self._float8_peak_flops / 1e12:,.4g} TFLOP/s in float8"
        for name, title, text in (
            ("step_seconds", "Step time", "{:,.4g} s"),
            ("model_flops_utilization", "Model FLOPs utilization", peak_format),
            ("fp8_share", "Linear layers in float8", "{:.1%} of their FLOPs"),
            ("data_wait_share", "Waiting for data", "{:.1%} of the time"),
            ("padding_share", "Padding", "{:.1%} of the tokens"),
            ("ignored_share", "Ignored labels", "{:.1%} of the labels"),
        ):
            if name in results:
                yield title, text.format(results[name])

    # Checkpoints

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._counter is not None and not self._is_interrupted:
            self._finish_all(trainer)
        if "callbacks" in checkpoint:
            checkpoint["callbacks"][self.state_key] = self.state_dict()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"totals": dict(self._totals), "points": [dict(point) for point in self.points]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._totals = Totals(int, state_dict["totals"])
        self.points = [dict(point) for point in state_dict["points"]]


def after_configure_model(module: L.LightningModule, call: Callable[[], None]) -> None:
    """Calls ``call`` once the module has its model: Lightning has no hook before the strategy wraps the module."""
    configure_model = module.configure_model

    @functools.wraps(configure_model)
    def configure_and_call() -> None:
        configure_model()
        call()

    if type(module).configure_model is L.LightningModule.configure_model:
        call()
    else:
        module.configure_model = configure_and_call  # type: ignore[method-assign]  # of this instance only


def _device(trainer: L.Trainer) -> tuple[str, float, float]:
    """The name of the device of rank 0 and its peak rates in FLOP/s, the second one in float8.

    A device that is not in the table is measured, and has one rate for both.
    """
    if not trainer.is_global_zero:
        return "", 1.0, 1.0
    device, precision = trainer.strategy.root_device, str(trainer.precision)
    # That of the weights under 32-true: they may have been loaded in 16 bits.
    parameters = [each for each in trainer.lightning_module.parameters() if each.is_floating_point()]
    largest = max(parameters, key=lambda each: 0 if is_lazy(each) else each.numel(), default=torch.zeros(()))
    dtype = next((dtype for key, dtype in _DTYPES.items() if precision.startswith(key)), largest.dtype)
    if device.type != "cuda":
        rate = measure_matmul_flops(device, dtype)
        return f"{device.type} process", rate, rate
    properties = torch.cuda.get_device_properties(device)
    gpu = find_gpu(properties.name, properties.total_memory) if dtype != torch.float64 else None
    rate = gpu.peak_flops(dtype) if gpu else measure_matmul_flops(device, dtype)
    return (gpu.name, rate, gpu.float8_flops or rate) if gpu else (properties.name, rate, rate)


def _loss(trainer: L.Trainer, outputs: Any) -> Tensor | None:
    """The loss of the last step, None if ``training_step`` returned none."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else None
    if loss is not None and trainer.lightning_module.automatic_optimization:  # has divided it
        loss = loss * trainer.accumulate_grad_batches
    return trainer.callback_metrics.get("train_loss_step", loss)


def _logs_norm(trainer: L.Trainer) -> bool:
    """Whether clipping takes the norm anyway, and a strategy of this package logs it, or DeepSpeed does."""
    if getattr(trainer.strategy, "deepspeed_engine", None) is not None:
        return True
    by_norm = str(trainer.gradient_clip_algorithm or "norm").endswith("norm") and (trainer.gradient_clip_val or 0) > 0
    return by_norm and any(hasattr(each, "on_nonfinite_grad") for each in (trainer.strategy, trainer.precision_plugin))


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """A context whose exception becomes a one-line warning: it neither ends a run nor replaces the run's exception."""
    try:
        yield
    except Exception as error:  # of a broken device, or of any file system
        rank_zero_warn(f"LigerMonitor {what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
