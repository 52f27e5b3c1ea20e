"""Training that is interrupted and resumed, and the worker that does so on several processes under each strategy.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from lightning_liger import Float8Recipe, LigerModelParallelStrategy, LigerStrategy
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    NUM_RANKS,
    Batch,
    Losses,
    make_optimizer,
    make_trainer,
)
from tests.lightning_liger.strategies.workers.trainings import rank_main

NUM_BATCHES = 7
"""Of each rank in an epoch: the last optimizer step of an epoch has fewer micro-batches than the others."""
NUM_EPOCHS = 2
MICRO_BATCHES = 2
ROWS = 2


class Rows(Dataset[Batch]):
    """Rows of tokens with labels of which different numbers are ignored, changed by all kinds of random numbers."""

    def __init__(self, num_rows: int, is_random: bool = True) -> None:
        generator = torch.Generator().manual_seed(3)
        self.input_ids = torch.randint(16, (num_rows, 13), generator=generator)
        self.is_random = is_random

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> Batch:
        labels = self.input_ids[index].clone()
        labels[: 1 + index % 9] = -100
        if self.is_random:
            drawn = (int(torch.randint(12, ())), int(np.random.randint(12)), random.randrange(12))
            labels[list(drawn)] = -100
        return {"input_ids": self.input_ids[index], "labels": labels}


class DropoutLM(LM):
    """Drops out embeddings, and changes its learning rate in each step."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.dropout = dropout
        self.learning_rates: list[float] = []

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            super().configure_model()
            self.model.get_input_embeddings().register_forward_hook(self._drop)

    def _drop(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return nn.functional.dropout(output, self.dropout, self.training)

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_start(self, *_: Any) -> None:
        self.learning_rates.append(self.optimizers().param_groups[0]["lr"])


class SaveAt(L.Callback):
    """Saves to ``folder`` under names that ``points`` gives a hook of the Trainer, an epoch and a batch."""

    def __init__(self, folder: Path, points: dict[str, tuple[str, int, int]]) -> None:
        self.folder, self.points = folder, points

    def _save(self, hook: str, trainer: L.Trainer) -> None:
        at = (hook, trainer.current_epoch, trainer.fit_loop.batch_idx)
        for name, point in self.points.items():
            if at == point and not trainer.sanity_checking:
                trainer.save_checkpoint(self.folder / name, weights_only=False)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save("batch", trainer)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save("validation", trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save("epoch", trainer)


class EpochMetrics(L.Callback):
    """Keeps the logged metrics of each epoch."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        if "train_loss" in logged:
            self.metrics[trainer.current_epoch - 1] = logged

    on_train_end = on_train_epoch_start


class Run(NamedTuple):
    """What there is to compare of a run."""

    losses: list[float]
    learning_rates: list[float]
    metrics: dict[int, dict[str, float]]
    parameters: list[Tensor]
    global_step: int
    logged_step: int


def fit(
    folder: Path,
    *,
    seed: int = 0,
    points: dict[str, tuple[str, int, int]] | None = None,
    module: L.LightningModule | None = None,
    loader: Callable[[], Iterable[Any]] | None = None,
    callbacks: Iterable[L.Callback] = (),
    ckpt_path: Path | str | None = None,
    **options: Any,
) -> Run:
    """Trains for two epochs of shuffled batches; a process that resumes has another ``seed``."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    module = DropoutLM() if module is None else module
    recorder, epochs = Losses(), EpochMetrics()
    defaults = {"accumulate_grad_batches": MICRO_BATCHES, "max_epochs": NUM_EPOCHS, "use_distributed_sampler": True}
    trainer = make_trainer(
        recorder, epochs, SaveAt(folder, points or {}), *callbacks, root=folder, **{**defaults, **options}
    )
    trainer.fit(module, (loader or shuffled_loader)(), validation_loader(), ckpt_path=ckpt_path)
    logged_step = trainer.fit_loop.epoch_loop._batches_that_stepped
    parameters = [parameter.detach() for parameter in trainer.strategy.model.parameters()]
    parameters = [each.to_local() if isinstance(each, DTensor) else each for each in parameters]
    parameters = [each.cpu().clone() for each in parameters]
    return Run(recorder.losses, module.learning_rates, epochs.metrics, parameters, trainer.global_step, logged_step)


def shuffled_loader(is_random: bool = True, num_ranks: int = 1, **options: Any) -> DataLoader[Batch]:
    rows = Rows(NUM_BATCHES * ROWS * num_ranks, is_random)
    return DataLoader(rows, batch_size=ROWS, shuffle=True, **options)


def validation_loader() -> DataLoader[Batch]:
    return DataLoader(Rows(2 * NUM_RANKS, is_random=False), batch_size=ROWS)


def num_left(point: tuple[str, int, int], micro_batches: int = MICRO_BATCHES) -> int:
    """How many batches follow the last optimizer step before a point."""
    _, epoch, batch = point
    done = batch + 1
    if done < NUM_BATCHES:
        done -= done % micro_batches
    return (NUM_EPOCHS - epoch) * NUM_BATCHES - done


# What one rank does

FLOAT8 = partial(Float8Recipe, filter=["*"], min_tokens=1)
STRATEGIES: dict[str, Callable[[], Any]] = {
    "liger_ddp": lambda: "liger_ddp",
    "liger_fsdp": lambda: "liger_fsdp",
    "liger_fsdp-sharded": lambda: LigerStrategy(state_dict_type="sharded"),
    "liger_model_parallel": lambda: "liger_model_parallel",
    "liger_fsdp-fp8": lambda: LigerStrategy(state_dict_type="sharded", fp8=FLOAT8()),
    "liger_model_parallel-fp8": lambda: LigerModelParallelStrategy(fp8=FLOAT8(all_gather=True)),
    "liger_model_parallel-full": lambda: LigerModelParallelStrategy(save_distributed_checkpoint=False),
}
POINTS = {"window.ckpt": ("batch", 1, 2), "epoch.ckpt": ("epoch", 0, NUM_BATCHES - 1)}
"""Between the micro-batches of a step, and after an epoch."""
EXCHANGES = [
    ("liger_fsdp", "ddp"),
    ("liger_model_parallel-full", "ddp"),
    ("ddp", "liger_fsdp"),
    ("ddp", "liger_model_parallel-full"),
]
"""The strategy that saves, and the one that resumes."""


def results(run: dict[str, Any]) -> dict[str, Any]:
    folder, devices = run["folder"], {"accelerator": run["accelerator"], "devices": run["size"]}

    def train(name: str, seed: int, way: str, **options: Any) -> dict[str, Any]:
        (folder / way).mkdir(exist_ok=True)
        strategy = (STRATEGIES | {"ddp": DDPStrategy})[name]()
        return fit(folder / way, seed=seed + run["rank"], strategy=strategy, **devices, **options)._asdict()

    def train_fixed(name: str, seed: int, **options: Any) -> dict[str, Any]:
        options |= {"module": DropoutLM(dropout=0.0), "loader": partial(shuffled_loader, False, NUM_RANKS)}
        return train(name, seed, f"fixed-{name}", limit_val_batches=0, **options)

    loader = partial(shuffled_loader, num_ranks=NUM_RANKS)
    found: dict[str, Any] = {}
    for way in STRATEGIES:
        found[way] = {"uninterrupted": train(way, 0, way, points=POINTS, loader=loader)}
        for name in POINTS:
            found[way][name] = train(way, 90, way, loader=loader, ckpt_path=folder / way / name)
    for way in dict.fromkeys(name for exchange in EXCHANGES for name in exchange):
        found[f"fixed-{way}"] = train_fixed(way, 0, points={"epoch.ckpt": POINTS["epoch.ckpt"]})
    for saved_by, resumed_by in EXCHANGES:
        path = folder / f"fixed-{saved_by}" / "epoch.ckpt"
        found[f"{saved_by} to {resumed_by}"] = train_fixed(resumed_by, 90, ckpt_path=path)
    return found


if __name__ == "__main__":
    rank_main(results)
