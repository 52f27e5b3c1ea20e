"""One arm of ``lightning-liger bench``: ``fit`` of the user's settings for some steps, which are measured.

``python -m lightning_liger.cli.bench_arm fit --config user.yaml ... --bench.output arm --bench.kernels false``: each
process writes what it measured to ``arm.<rank>.json``.
"""

import importlib
import itertools
import json
import os
import statistics
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lightning_liger.callbacks import LigerCallback
from lightning_liger.cli.messages import end, message_of
from lightning_liger.cli.training import LigerCLI
from lightning_liger.monitor.clock import Moment, peak_memory, share_of_each
from lightning_liger.monitor.tokens import count_tokens
from lightning_liger.strategies.registration import REGISTRATIONS
from lightning_liger.strategies.trainer import TrainerStrategy

_KEPT_CALLBACKS = ("LigerCallback", "GradientAccumulationScheduler", "StochasticWeightAveraging", "WeightAveraging")
"""Callbacks of Lightning and of this package that change how a step trains. Those of users are all kept."""
_TABLES = ("lightning_liger.callbacks.summary", "lightning_liger.callbacks.predictions", "lightning_liger.monitor")
"""Modules of callbacks that the command adds by itself."""
_OURS = {name: (strategy, options) for name, strategy, _, _, options in REGISTRATIONS}


class _BenchCLI(LigerCLI):
    """``fit`` with the strategy's kernels and memory budget replaced, and without callbacks that write."""

    def __init__(self, args: ArgsType = None) -> None:
        super().__init__(args, save_config_callback=None)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--bench.output", type=str, help="Begins the names of the files to write.")
        parser.add_argument("--bench.warm_up", type=int, help="Steps that are not measured.")
        parser.add_argument("--bench.kernels", type=bool, help="Whether kernels are applied.")
        parser.add_argument("--bench.memory_budget", type=str, default=None, help="In place of that of the settings.")

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {"fit": LightningCLI.subcommands()["fit"]}

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        config = self.config["fit"]
        trainer, bench = config.trainer, config.bench
        callbacks = trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks]
        callbacks = [callback for callback in callbacks if callback is not None and _changes_training(callback)]
        budget = bench.memory_budget
        if budget is not None and budget != "auto":
            budget = float(budget)
        own = [each for each in callbacks if _name_of(each) == "LigerCallback"]
        others = [each for each in callbacks if _name_of(each) != "LigerCallback"]
        if _takes_kernels(trainer.strategy):
            trainer.strategy = choose(trainer.strategy, bench.kernels, budget)
        elif bench.kernels:  # a strategy of others, whose kernels come with a callback
            path = f"{LigerCallback.__module__}.{LigerCallback.__qualname__}"
            own = [_with_budget(own[0] if own else Namespace(class_path=path, init_args=Namespace()), budget)]
        trainer.callbacks = [*others, *(own if bench.kernels else [])]

    @override
    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        bench = self.config["fit"].bench
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set outside of __init__
        callbacks[:] = [each for each in callbacks if not type(each).__module__.startswith(_TABLES)]
        callbacks.append(Meter(bench.output, bench.warm_up))
        return trainer


def _name_of(described: Any) -> str:
    return str(getattr(described, "class_path", described)).rpartition(".")[2]


def _changes_training(callback: Any) -> bool:
    package = str(getattr(callback, "class_path", "")).partition(".")[0]
    return package not in ("lightning", "pytorch_lightning", "lightning_liger") or _name_of(callback) in _KEPT_CALLBACKS


def _takes_kernels(strategy: Any) -> bool:
    """Whether it is one of our strategies, or of a class made of one."""
    if isinstance(strategy, str):
        return strategy in _OURS
    module, _, name = str(getattr(strategy, "class_path", "")).rpartition(".")
    return bool(module) and issubclass(getattr(importlib.import_module(module), name), TrainerStrategy)


def choose(strategy: Any, kernels: bool, memory_budget: str | float | None) -> Namespace:
    """The setting of one of our strategies, changed.

    Args:
        strategy: A name in the registry, or a namespace with ``class_path``.
        kernels: False sets ``kernels`` to ``"none"`` and leaves out ``memory_budget``, so that the strategy runs the
            model as Lightning's does.
        memory_budget: Replaces that of the setting and ``activation_checkpointing``; None leaves both.
    """
    if isinstance(strategy, str):
        cls, options = _OURS[strategy]
        strategy = Namespace(class_path=f"{cls.__module__}.{cls.__qualname__}", init_args=Namespace(**options))
    changed = Namespace(class_path=strategy.class_path, init_args=strategy.get("init_args") or Namespace())
    if not kernels:
        changed.init_args.kernels, changed.init_args.memory_budget = "none", None
        return changed
    return _with_budget(changed, memory_budget)


def _with_budget(described: Namespace, memory_budget: str | float | None) -> Namespace:
    if memory_budget is not None:
        described.init_args.memory_budget = memory_budget
        described.init_args.activation_checkpointing = None
        if described.init_args.get("activation_checkpointing_policy") is not None:
            described.init_args.activation_checkpointing_policy = None
    return described


class Meter(L.Callback):
    """Measures optimizer steps, and writes the result when training ends or fails.

    Args:
        output: Begins the name of the file of this process.
        warm_up: Steps that are not measured.
    """

    def __init__(self, output: str, warm_up: int) -> None:
        self._output, self._warm_up = output, warm_up
        self._marks: list[Moment] = []
        self._num_steps = 0
        self._num_tokens = 0
        self._peak_before = 0
        self._loss: Any = None
        self._first_loss: float | None = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._is_cuda = trainer.strategy.root_device.type == "cuda"
        self._num_steps = trainer.global_step
        if not self._warm_up:
            self._begin(trainer)

    def _begin(self, trainer: L.Trainer) -> None:
        if self._is_cuda:
            self._peak_before = peak_memory(trainer.strategy)
            torch.cuda.reset_peak_memory_stats()
        self._marks.append(Moment(trainer.strategy.root_device))

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if self._marks:
            self._num_tokens += count_tokens(batch)
        if trainer.global_step == self._num_steps:
            return  # an optimizer step takes several batches
        self._num_steps = trainer.global_step
        self._loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if self._first_loss is None and not self._marks:
            self._first_loss = self._last_loss(trainer)
        if self._marks:
            self._marks.append(Moment(trainer.strategy.root_device))
        elif trainer.global_step >= self._warm_up:
            self._begin(trainer)

    def _last_loss(self, trainer: L.Trainer) -> float | None:
        """The loss of the last step, for which the host waits; None if it is not known."""
        metrics = trainer.callback_metrics
        names = [name for name in ("train_loss_step", "train_loss", "loss") if name in metrics]
        loss = metrics[names[0]] if names else self._loss
        return float(loss) if isinstance(loss, Tensor) else None

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seconds = [end.seconds_since(start) for start, end in itertools.pairwise(self._marks)]
        if not seconds:
            raise ValueError(f"steps must be fewer: training ended after {trainer.global_step} optimizer steps")
        num_shares = share_of_each(trainer) * trainer.world_size
        result = {
            "status": "ok",
            "processes": trainer.world_size,
            "device": torch.cuda.get_device_name() if self._is_cuda else "CPU",
            "precision": str(trainer.precision),
            "step_seconds": seconds,
            "seconds_per_step": statistics.median(seconds),
            "tokens_per_step": self._num_tokens * num_shares / len(seconds),
            "first_loss": self._first_loss,
            "loss": self._last_loss(trainer),
            "plan": getattr(trainer.strategy, "activation_plan", "") or "",
        }
        if self._is_cuda:
            steady = torch.cuda.max_memory_allocated()
            result["peak_bytes"] = steady
            result["peak_bytes_with_warm_up"] = max(steady, self._peak_before)
            result["reserved_bytes"] = torch.cuda.max_memory_reserved()
        else:
            result["peak_bytes"] = peak_memory(trainer.strategy)
        write(self._output, result)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        fail(self._output, exception)
        traceback.print_exception(exception)
        sys.stderr.flush()
        os._exit(1)  # other processes may wait for this one, and this one would for them


def write(output: str, result: dict[str, Any]) -> None:
    """Writes the result of this process."""
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    Path(f"{output}.{rank}.json").write_text(json.dumps(result), encoding="utf-8")


def fail(output: str, error: BaseException) -> None:
    """Writes that this process failed, and why."""
    ran_out = is_out_of_memory(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
    write(output, {"status": "out of memory" if ran_out else "failed", "error": reason})


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is that memory ran out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def main() -> None:
    """Trains and measures, by the options of the command line."""
    try:
        _BenchCLI()
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
        end(message)


if __name__ == "__main__":
    main()
