"""Processes that get SIGTERM or SIGKILL, or whose disk is full, in the middle of training.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``; with ``cpu OUT FAULT``, a program
that trains on several processes, started by Lightning, until that one of ``FAULTS`` happens.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.lightning_liger.resuming.workers.resume import STRATEGIES, fit, shuffled_loader
from tests.lightning_liger.strategies.workers.distributed import NUM_RANKS
from tests.lightning_liger.strategies.workers.trainings import rank_main

FAULT_AT = (1, 3)
"""Epoch and batch: the second of two micro-batches."""
FAULTS = {"kill-0": (signal.SIGKILL, [0]), "kill-1": (signal.SIGKILL, [1]), "sigterm": (signal.SIGTERM, [0])}
"""Signal, and ranks that get it."""
SIGTERMS = [
    ("liger_fsdp", "one", [1]),
    ("liger_fsdp", "first", [0]),
    ("liger_fsdp", "all", list(range(NUM_RANKS))),
    ("liger_fsdp-sharded", "one", [1]),
]
"""Strategy, and which ranks get the signal."""
WAYS = ("liger_fsdp", "liger_fsdp-sharded", "liger_model_parallel")
"""Strategies with which every kind of checkpoint is written."""


class Signaled(L.Callback):
    """Sends a signal to its own process, if that is one of ``ranks``, in the middle of a training step."""

    def __init__(self, signum: int, ranks: list[int], at: tuple[int, int] = FAULT_AT) -> None:
        self.signum, self.ranks, self.at = signum, ranks, at

    def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
        at = (trainer.current_epoch, trainer.fit_loop.batch_idx)
        if at == self.at and trainer.global_rank in self.ranks:
            os.kill(os.getpid(), self.signum)


def saves(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=4, save_top_k=-1, save_last=True, save_on_exception=True
    )


def _train(folder: Path, device: str, **options: Any) -> dict[str, Any]:
    defaults = {"accelerator": {"cuda": "gpu"}.get(device, device), "devices": NUM_RANKS, "enable_checkpointing": True}
    options.setdefault("loader", lambda: shuffled_loader(num_ranks=NUM_RANKS))
    return fit(folder, **{**defaults, **options})._asdict()


def _error_of(action: Callable[[], Any]) -> BaseException | None:
    try:
        action()
    except (Exception, SIGTERMException) as error:
        return error
    return None


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Writing more to one file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FillsDisk(L.Callback):
    """Saves once more over a checkpoint, with a disk that is full for one rank."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.error: BaseException | None = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with files_of_at_most(2**12) if trainer.global_rank == self.rank else nullcontext():
            self.error = _error_of(lambda: trainer.save_checkpoint(self.path, weights_only=False))


def _results(run: dict[str, Any]) -> dict[str, Any]:
    folder, device, rank = run["folder"], run["device"], run["rank"]
    results: dict[str, Any] = {}
    for way in WAYS:
        here = folder / way
        full = FillsDisk(here / "last.ckpt", rank=0 if way == "liger_fsdp" else NUM_RANKS - 1)
        options = {"seed": rank, "callbacks": [saves(here), full]}
        results[way] = {"uninterrupted": _train(here, device, strategy=STRATEGIES[way](), **options)}
        results[way]["full-disk"] = full.error
        torch.distributed.barrier()  # rank 0 removes the incomplete files of all
        results[way]["after-full-disk"] = sorted(path.name for path in here.iterdir())
    for way, to, signaled in SIGTERMS:
        here = folder / f"{way}-sigterm-{to}"
        options = {"strategy": STRATEGIES[way](), "callbacks": [saves(here), Signaled(signal.SIGTERM, signaled)]}
        error = _error_of(lambda: _train(here, device, seed=rank, **options))  # noqa: B023
        results[way][f"sigterm-{to}"] = {
            "error": type(error),
            "exit_code": getattr(error, "code", None),
            "resumed": _train(here, device, strategy=STRATEGIES[way](), seed=90, ckpt_path=here / "last.ckpt"),
        }
    for fault in ("kill-0", "kill-1"):
        # Left by the programs that were killed.
        path = folder / fault / "last.ckpt"
        results[fault] = _train(folder, device, strategy="liger_fsdp", seed=90, ckpt_path=path)
    return results


def _run_program(device: str, folder: Path, fault: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    (folder / f"{fault}-{rank}.pid").write_text(str(os.getpid()))
    callbacks = [saves(folder / fault), Signaled(*FAULTS[fault])]
    _train(folder / fault, device, strategy="liger_fsdp", seed=rank, callbacks=callbacks)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        _run_program(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    else:
        rank_main(_results)
