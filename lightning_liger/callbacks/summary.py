"""The table of replacements before training, and a summary of speed, losses and memory after it."""

import resource
import time
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from liger_ops.arguments import check_integer
from lightning_liger.callbacks.kernels import LigerCallback
from lightning_liger.patching import PatchReport


class TrainingSummary(L.Callback):
    """Prints the table of replacements when training starts and a summary when it ends.

    The summary: tokens per second (of all processes, where those that share batches count as one; without validation
    and the first ``skip_steps`` steps), the last losses, the peak memory of a process, the bytes of logits that
    were never allocated, and the plan for a ``memory_budget``; numbers are also in ``results``.

    Args:
        skip_steps: Steps at the start (compilation, allocation) that are left out of the speed.

    Raises:
        TypeError: If ``skip_steps`` is no integer.
        ValueError: If ``skip_steps`` is negative.
    """

    def __init__(self, skip_steps: int = 2) -> None:
        check_integer("skip_steps", skip_steps, at_least=0)
        self.skip_steps = skip_steps
        self.results: dict[str, float] = {}
        self._num_batches = 0
        self._num_tokens = 0
        self._seconds = 0.0
        self._interval_start: float | None = None

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)
        report = _patch_report(trainer)
        if trainer.is_global_zero:
            console = Console()
            console.print(report if report is not None else "lightning-liger: no kernels were applied")

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        if self._num_batches > self.skip_steps * trainer.accumulate_grad_batches:
            if self._interval_start is None:
                self._interval_start = _now(trainer)
            self._num_tokens += _count_tokens(batch)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_clock(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_clock(trainer)

    def _stop_clock(self, trainer: L.Trainer) -> None:
        if self._interval_start is not None:
            self._seconds += _now(trainer) - self._interval_start
            self._interval_start = None

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        counters = [
            vars(module)["fusion_counters"] for module in pl_module.modules() if "fusion_counters" in vars(module)
        ]
        # Peak memory is that of this process; the rest is summed over the processes.
        totals = torch.tensor(
            [self._num_tokens, sum(each.bytes_avoided for each in counters)],
            dtype=torch.float64,
            device=trainer.strategy.root_device,
        )
        num_tokens, bytes_avoided = trainer.strategy.reduce(totals, reduce_op="sum").tolist()
        # Tensor- and context-parallel ranks count the same batches.
        sampler = trainer.distributed_sampler_kwargs
        num_tokens *= sampler["num_replicas"] / trainer.world_size if sampler is not None else 1
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.results = {
            "steps": trainer.global_step,
            "processes": trainer.world_size,
            "tokens_per_second": num_tokens / self._seconds if self._seconds else 0.0,
            "peak_memory_bytes": _peak_memory(trainer.strategy),
            "logits_bytes_avoided": bytes_avoided,
            "num_fused_losses": sum(each.num_losses for each in counters),
            "whole_logits": sum(each.num_materialized for each in counters),
            **metrics,
        }

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Not in on_fit_end, when a progress bar still owns the terminal.
        if stage == "fit" and self.results and trainer.is_global_zero:
            Console().print(self._table(trainer))

    def _table(self, trainer: L.Trainer) -> Table:
        results, world_size = self.results, trainer.world_size
        device = trainer.strategy.root_device.type
        speed, avoided = results["tokens_per_second"], results["logits_bytes_avoided"]
        rows = {
            "Steps": f"{trainer.global_step} on {world_size} {device} process{'es' if world_size > 1 else ''}",
            "Tokens/s": f"{speed:,.0f} ({speed / world_size:,.0f} a process)" if speed else "too few steps to tell",
            **{_title(name): f"{value:.4g}" for name, value in results.items() if name.startswith(("train_", "val_"))},
            f"Peak {'GPU ' if device == 'cuda' else ''}memory": f"{_readable(results['peak_memory_bytes'])} a process",
            "Logits never allocated": _readable(avoided),
        }
        plan = getattr(trainer.strategy, "activation_plan", "")
        if plan:
            rows["Activations"] = plan
        if results["num_fused_losses"]:
            each = avoided / results["num_fused_losses"] / world_size
            rows["Logits never allocated"] += f" in all, {_readable(each)} in each loss"
        table = Table(title="Training summary", title_justify="left", title_style="bold", show_header=False)
        for name, value in rows.items():
            table.add_row(name, value)
        return table


def _readable(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _title(name: str) -> str:
    stage, _, rest = name.partition("_")
    return f"{'Training' if stage == 'train' else 'Validation'} {'last loss' if rest == 'loss_step' else rest}"


def _now(trainer: L.Trainer) -> float:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.root_device)
    return time.perf_counter()


def _count_tokens(batch: Any) -> int:
    input_ids = batch.get("input_ids") if hasattr(batch, "get") else None
    return input_ids.numel() if isinstance(input_ids, torch.Tensor) else 0


def _peak_memory(strategy: Any) -> int:
    if strategy.root_device.type == "cuda":
        # A memory_budget resets the peak while it measures.
        measured = getattr(strategy, "peak_before_resets", 0)
        return max(measured, torch.cuda.max_memory_allocated(strategy.root_device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _patch_report(trainer: L.Trainer) -> PatchReport | None:
    """The report of the strategy or, under a strategy without kernels, of :class:`LigerCallback`."""
    report = getattr(trainer.strategy, "patch_report", None)
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set outside of Trainer.__init__
    for callback in callbacks:
        if isinstance(callback, LigerCallback):
            report = report or callback.patch_report
    return report
