"""What strategies do to stop and go on: atomic checkpoints, all that a process needs to resume, and SIGTERM."""

import ctypes
import signal
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils._pytree import tree_leaves

from lightning_liger.resuming.atomic_io import AtomicCheckpointIO, fail_together, of_all_ranks, save_on_all_ranks
from lightning_liger.resuming.dataloader import (
    STATE_KEY,
    ResumableDataLoader,
    random_state,
    resumable,
    set_random_state,
)

_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_KEY = "lightning_liger"  # of a checkpoint: what each rank needs for itself


class _AtomicIO:
    """What the Trainer's and Fabric's strategies share; placed before Lightning's class."""

    _checkpoint_io: Any

    @property
    def checkpoint_io(self) -> Any:
        """Of the user, or one that writes atomically."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # unless it has one
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: Any) -> None:
        self._checkpoint_io = checkpoint_io


class FabricCheckpoints(_AtomicIO):
    """Placed before a strategy of Fabric's, makes its checkpoints atomic."""

    _writes_by_itself = False
    """Whether the strategy writes files and folders without its ``checkpoint_io``."""

    def save_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> None:
        def save(to: Any) -> None:
            super(FabricCheckpoints, self).save_checkpoint(to, *args, **kwargs)  # type: ignore[misc]

        path = self.broadcast(path)  # type: ignore[attr-defined]
        if self._writes_by_itself:
            save_on_all_ranks(Path(path), save)
        else:
            fail_together(path, lambda: save(path))


class TrainerCheckpoints(_AtomicIO):
    """Placed before a strategy of the Trainer's, makes its checkpoints atomic and lets training resume bit for bit.

    A checkpoint also holds what belongs to each rank: its random states, where its data loaders are, and what the
    module's ``rank_state_dict`` returns. One that falls between the micro-batches of an optimizer step is a checkpoint
    of the beginning of that step: gradients are not saved. Validation leaves the random states of training alone.

    On SIGTERM, to any of the ranks, all end together after the batch they are at, with ``SIGTERMException``, for which
    ``ModelCheckpoint(save_on_exception=True)`` saves; the process ends with exit code 143.
    """

    lightning_module: L.LightningModule | None
    saves_folders = False
    """Whether checkpoints are folders, to which all ranks write."""

    _loaded: dict[str, Any] | None = None
    _step_start: dict[str, Any] | None = None
    _before_validation: dict[str, Any] | None = None
    _received_sigterm = False

    # Saving and loading

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Saves atomically; an error on one rank is one on all."""

        def save(to: Any) -> None:
            super(TrainerCheckpoints, self).save_checkpoint(checkpoint, to, storage_options)  # type: ignore[misc]

        if "optimizer_states" in checkpoint and self._is_fitting:
            self._add_rank_states(checkpoint)
        path = self.broadcast(filepath)  # type: ignore[attr-defined]
        if self.saves_folders and storage_options is None:
            save_on_all_ranks(Path(path), save)
        else:
            fail_together(path, lambda: save(path))

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Then keeps what belongs to this rank until training starts."""
        checkpoint = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        if self._is_fitting and "loops" in checkpoint:
            self._take_rank_state(checkpoint)
        return checkpoint

    @property
    def _trainer(self) -> L.Trainer:
        return self.lightning_module.trainer

    @property
    def _is_fitting(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING

    def _rank_state(self) -> dict[str, Any]:
        """What belongs to this rank; the random state is the one before the next batch is fetched."""
        of_module = getattr(self.lightning_module, "rank_state_dict", None)
        return {"random_state": random_state(), "module": None if of_module is None else of_module()}

    def _add_rank_states(self, checkpoint: dict[str, Any]) -> None:
        loops = checkpoint["loops"]["fit_loop"]
        progress = loops["epoch_loop.batch_progress"]["current"]
        fetched, num_batches = progress["ready"], progress["processed"]
        if not _epoch_is_over(loops):
            num_batches -= self._num_batches_since_step(num_batches)
        state = self._rank_state()
        if fetched != num_batches:
            _rewind(loops, progress["processed"] - num_batches)
            state = self._step_start or state
        elif self._before_validation is not None:
            state |= {"random_state": self._before_validation}
        loaders = loops["state_dict"].pop("combined_loader", [])
        # Lightning keeps those of the first rank, and resumes with no fewer loaders that have any.
        if others := [loader for loader in loaders if STATE_KEY not in loader]:
            loops["state_dict"]["combined_loader"] = others
            if fetched != num_batches:
                rank_zero_warn(
                    "The checkpoint is saved between the micro-batches of an optimizer step, with a stateful data"
                    f" loader other than {ResumableDataLoader.__name__}: resuming will leave out batches of this step."
                )
        ours = [loader for loader in loaders if STATE_KEY in loader]
        ahead = max((loader["num_batches"] for loader in ours), default=num_batches) - num_batches
        state |= {
            "loaders": [{**loader, "num_batches": max(0, loader["num_batches"] - ahead)} for loader in ours],
            "other_loaders": others,
        }
        checkpoint[_KEY] = {"ranks": of_all_ranks(move_data_to_device(state, "cpu"))}

    def _num_batches_since_step(self, num_processed: int) -> int:
        """How many of the processed batches the optimizer has not seen yet; it sees the last one of an epoch."""
        trainer = self._trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress
        is_last = progress.is_last_batch or progress.current.ready == trainer.num_training_batches
        if is_last and progress.current.ready == num_processed:
            return 0
        return num_processed % trainer.accumulate_grad_batches

    def _take_rank_state(self, checkpoint: dict[str, Any]) -> None:
        loops = checkpoint["loops"]["fit_loop"]
        progress = loops["epoch_loop.batch_progress"]
        states = checkpoint.pop(_KEY, {"ranks": []})["ranks"]
        if len(states) == self.world_size:  # type: ignore[attr-defined]
            state = states[self.global_rank]  # type: ignore[attr-defined]
        else:
            # Lightning's own checkpoints, and those of other numbers of ranks, know the number of batches only.
            loaders = [{STATE_KEY: True, "num_batches": progress["current"]["processed"]}]
            state = {"random_state": None, "module": None, "loaders": loaders, "other_loaders": []}
            if states:
                rank_zero_warn(
                    f"The checkpoint was saved by {len(states)} processes and is resumed by {self.world_size}: random"  # type: ignore[attr-defined]
                    " states start anew, averages over the epoch are of what is left of it, and the epoch goes on at"
                    " the same number of batches, with data that is split differently."
                )
        if state["other_loaders"]:
            loops["state_dict"]["combined_loader"] = state["other_loaders"]
        if progress["is_last_batch"] or _epoch_is_over(loops):  # the next epoch starts with nothing seen
            state |= {"loaders": [{**loader, "is_done": True} for loader in state["loaders"]], "module": None}
        self._loaded = state

    # Going on

    def process_dataloader(self, dataloader: Any) -> Any:
        """Makes training's loaders resumable, and validation's, which so draw no random numbers before their use."""
        loader = super().process_dataloader(dataloader)  # type: ignore[misc]
        if not self._is_fitting:
            return loader
        loader = resumable(loader)
        if self._loaded is not None and self._trainer.training and _is_ours(loader):
            if self._loaded["loaders"]:
                loader.load_state_dict(self._loaded["loaders"].pop(0))
            self._set_random_state()  # a loader that does not know its length starts before training does
        return loader

    def on_train_start(self) -> None:
        super().on_train_start()  # type: ignore[misc]
        self._step_start = self._before_validation = None
        if self._loaded is None:
            return
        if self._loaded["module"] is not None and hasattr(self.lightning_module, "load_rank_state_dict"):
            self.lightning_module.load_rank_state_dict(self._loaded["module"])
        if not self._random_state_before_fetch():
            self._set_random_state()
        self._loaded = None

    def _set_random_state(self) -> None:
        if self._loaded["random_state"] is not None:
            set_random_state(self._loaded["random_state"])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        if batch_idx % self._trainer.accumulate_grad_batches == 0:
            self._step_start = self._rank_state() | self._random_state_before_fetch()
        self._agree_on_sigterm()

    def _random_state_before_fetch(self) -> dict[str, Any]:
        loaders = tree_leaves(self._trainer.train_dataloader)
        before = next((loader.random_state_before_fetch for loader in loaders if _is_ours(loader)), None)
        return {} if before is None else {"random_state": before}

    def on_validation_start(self) -> None:
        super().on_validation_start()  # type: ignore[misc]
        if self._is_fitting:
            self._before_validation = random_state()

    def on_validation_end(self) -> None:
        super().on_validation_end()  # type: ignore[misc]
        if self._before_validation is not None:
            set_random_state(self._before_validation)
            self._before_validation = None

    # SIGTERM

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)  # type: ignore[misc]
        self._received_sigterm = False
        # Lightning's own starts a collective in the handler, in the middle of others, and waits forever if the ranks
        # were not signalled alike. It takes this method when it registers its handlers, after this hook.
        trainer._signal_connector._sigterm_notifier_fn = self._on_sigterm
        if self._is_launched and self.local_rank > 0:  # type: ignore[attr-defined]
            _end_with_launcher()

    def _on_sigterm(self, *_: Any) -> None:
        if not self._received_sigterm and self.launcher is not None:  # type: ignore[attr-defined]
            self.launcher.kill(signal.SIGTERM)  # type: ignore[attr-defined]
        self._received_sigterm = True
        if not (self._is_fitting and dist.is_initialized() and self.world_size > 1):  # type: ignore[attr-defined]
            self._trainer._signal_connector.received_sigterm = True

    def _agree_on_sigterm(self) -> None:
        """Lets all ranks know that one was told to end, at the same batch."""
        if not (dist.is_initialized() and self.world_size > 1):  # type: ignore[attr-defined]
            return
        received = torch.tensor(self._received_sigterm, dtype=torch.int32, device=self.root_device)  # type: ignore[attr-defined]
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
        # Lightning waits for the device in each batch too, so this finds it idle.
        if received.item():
            self._trainer._signal_connector.received_sigterm = True

    def on_exception(self, exception: BaseException) -> None:
        """Lets a process that was told to end tell so by its exit code; Lightning's is 0."""
        super().on_exception(exception)  # type: ignore[misc]
        # Lightning's launcher takes another code of one of its processes for a failure, and kills the first.
        if isinstance(exception, SIGTERMException) and not (self._is_launched and self.local_rank > 0):  # type: ignore[attr-defined]
            exception.code = 128 + signal.SIGTERM

    @property
    def _is_launched(self) -> bool:
        """Whether the first process of this machine starts the others, unless somebody else does by hand."""
        return isinstance(getattr(self, "cluster_environment", None), LightningEnvironment)


def _end_with_launcher() -> None:
    """Has Linux kill this process when the one that started it is gone, for which NCCL would wait half an hour."""
    prctl, parent = getattr(ctypes.CDLL(None), "prctl", None), psutil.Process().parent()
    if prctl is not None and parent is not None and parent.name().startswith("python"):
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _epoch_is_over(loops: dict[str, Any]) -> bool:
    epochs = loops["epoch_progress"]["current"]
    return epochs["processed"] == epochs["ready"]


def _rewind(loops: dict[str, Any], num_batches: int) -> None:
    """Takes back the last batches of the progress that Lightning saves."""
    progress = loops["epoch_loop.batch_progress"]
    # What a save at the end of a batch counts as processed, its resuming counts as completed and stepped.
    is_at_batch_end = progress["current"]["completed"] < progress["current"]["processed"]
    for counts in (progress["total"], progress["current"]):
        for name in counts:
            counts[name] -= num_batches
    if is_at_batch_end and num_batches:
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def _is_ours(loader: Any) -> bool:
    return isinstance(loader, ResumableDataLoader)
