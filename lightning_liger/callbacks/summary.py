"""The table of replacements before training, and a summary of speed, losses and memory after it."""

from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from liger_ops.arguments import check_integer
from lightning_liger.callbacks.kernels import LigerCallback
from lightning_liger.monitor import LigerMonitor
from lightning_liger.monitor.clock import TrainingClock, peak_memory, readable_bytes, share_of_each
from lightning_liger.monitor.page import table
from lightning_liger.monitor.tokens import count_tokens
from lightning_liger.patching import PatchReport


class TrainingSummary(L.Callback):
    """Prints the table of replacements when training starts and a summary when it ends.

    The summary: tokens per second (of all processes, where those that share batches count as one; without validation
    and the first ``skip_steps`` steps), the last losses, the peak memory of a process, the bytes of logits that
    were never allocated, the plan for a ``memory_budget``, and what a :class:`~lightning_liger.LigerMonitor` of the
    same Trainer has measured; numbers are also in ``results``.

    Args:
        skip_steps: Steps at the start (compilation, allocation) that are left out of the speed.

    Raises:
        TypeError: If ``skip_steps`` is no integer.
        ValueError: If ``skip_steps`` is negative.
    """

    shows_monitor = True
    """A :class:`~lightning_liger.LigerMonitor` prints no table then."""

    def __init__(self, skip_steps: int = 2) -> None:
        check_integer("skip_steps", skip_steps, at_least=0)
        self.skip_steps = skip_steps
        self.results: dict[str, float] = {}
        self._clock = TrainingClock(skip_steps)
        self._num_tokens, self._seconds = 0, 0.0

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)
        self._clock.fit_starts()
        self._num_tokens, self._seconds = 0, 0.0  # an interrupted fit has counted tokens only
        report = _patch_report(trainer)
        if trainer.is_global_zero:
            console = Console()
            console.print(report if report is not None else "lightning-liger: no kernels were applied")

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._clock.batch_starts(trainer):
            self._num_tokens += count_tokens(batch)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._clock.pause(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._clock.pause(trainer)
        self._seconds += self._clock.lap(trainer).seconds()

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
        num_tokens *= share_of_each(trainer)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.results = {
            "steps": trainer.global_step,
            "processes": trainer.world_size,
            "tokens_per_second": num_tokens / self._seconds if self._seconds else 0.0,
            "peak_memory_bytes": peak_memory(trainer.strategy),
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
        peak = readable_bytes(results["peak_memory_bytes"])
        rows = {
            "Steps": f"{trainer.global_step} on {world_size} {device} process{'es' if world_size > 1 else ''}",
            "Tokens/s": f"{speed:,.0f} ({speed / world_size:,.0f} a process)" if speed else "too few steps to tell",
            **{_title(name): f"{value:.4g}" for name, value in results.items() if name.startswith(("train_", "val_"))},
            f"Peak {'GPU ' if device == 'cuda' else ''}memory": f"{peak} a process",
        }
        if avoided:  # not where each loss took one chunk, or its chunks are not counted
            each = avoided / results["num_fused_losses"] / world_size
            rows["Logits never allocated"] = f"{readable_bytes(avoided)} in all, {readable_bytes(each)} in each loss"
        plan = getattr(trainer.strategy, "activation_plan", "")
        if plan:
            rows["Activations"] = plan
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set outside of Trainer.__init__
        for callback in callbacks:
            if isinstance(callback, LigerMonitor) and callback.results:
                further = callback.rows()
                rows |= {name: value for name, value in further.items() if name not in (*rows, "Peak memory")}
        return table("Training summary", rows)


def _title(name: str) -> str:
    stage, _, rest = name.partition("_")
    return f"{'Training' if stage == 'train' else 'Validation'} {'last loss' if rest == 'loss_step' else rest}"


def _patch_report(trainer: L.Trainer) -> PatchReport | None:
    """The report of the strategy or, under a strategy without kernels, of :class:`LigerCallback`."""
    report = getattr(trainer.strategy, "patch_report", None)
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set outside of Trainer.__init__
    for callback in callbacks:
        if isinstance(callback, LigerCallback):
            report = report or callback.patch_report
    return report
