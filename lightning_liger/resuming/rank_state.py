"""The part of a checkpoint that differs between ranks: random states, positions of loaders, state of the module."""

from typing import Any

import lightning as L
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_liger.resuming.atomic_io import gather_objects
from lightning_liger.resuming.dataloader import STATE_KEY, ResumableDataLoader, resumable
from lightning_liger.resuming.random_state import random_state, set_random_state

CHECKPOINT_KEY = "lightning_liger"
"""The key of a checkpoint under which the states of all ranks are."""


class RankStates:
    """Adds the state of each rank to the Trainer's checkpoints, and restores it when training resumes.

    Of the module it is what ``rank_state_dict`` returns, of tensors and plain Python objects, and
    ``load_rank_state_dict`` takes, if the module has these methods.

    A checkpoint saved between the micro-batches of an optimizer step resumes at the beginning of that step, because
    gradients are not saved: the state at that beginning is kept until the step is over.
    """

    _loaded: dict[str, Any] | None = None
    _step_start: dict[str, Any] | None = None
    _before_validation: dict[str, Any] | None = None

    # Saving

    def add_to(self, checkpoint: dict[str, Any], trainer: L.Trainer) -> None:
        """Adds the states of all ranks to a checkpoint of training; to be called on all ranks."""
        if "optimizer_states" not in checkpoint or not is_fitting(trainer):
            return
        loops = checkpoint["loops"]["fit_loop"]
        progress = loops["epoch_loop.batch_progress"]["current"]
        fetched, processed = progress["ready"], progress["processed"]
        num_batches = processed - (0 if _epoch_is_over(loops) else _num_batches_since_step(trainer, processed))
        state = _state(trainer, self._before_validation)
        if fetched != num_batches:
            _rewind(loops, processed - num_batches)
            state = self._step_start or state
        loaders = loops["state_dict"].pop("combined_loader", [])
        # Lightning saves the loaders' states of rank 0 only, and resumes with as many stateful loaders only.
        if others := [loader for loader in loaders if STATE_KEY not in loader]:
            loops["state_dict"]["combined_loader"] = others
            if fetched != num_batches:
                rank_zero_warn(
                    "The checkpoint is saved between the micro-batches of an optimizer step, with a stateful data"
                    f" loader other than {ResumableDataLoader.__name__}: resuming will skip batches of this step."
                )
        ours = [loader for loader in loaders if STATE_KEY in loader]
        ahead = max((loader["num_batches"] for loader in ours), default=num_batches) - num_batches
        state |= {
            "loaders": [{**loader, "num_batches": max(0, loader["num_batches"] - ahead)} for loader in ours],
            "other_loaders": others,
        }
        checkpoint[CHECKPOINT_KEY] = {"ranks": gather_objects(move_data_to_device(state, "cpu"))}

    def on_train_batch_start(self, batch_idx: int, trainer: L.Trainer) -> None:
        """Keeps the state at the beginning of an optimizer step."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._step_start = _state(trainer, _random_state_before_fetch(trainer))

    def on_validation_start(self, trainer: L.Trainer) -> None:
        """Keeps the random state of training."""
        if is_fitting(trainer):
            self._before_validation = random_state()

    def on_validation_end(self) -> None:
        """Restores the random state of training."""
        set_random_state(self._before_validation)
        self._before_validation = None

    # Resuming

    def take_from(self, checkpoint: dict[str, Any], trainer: L.Trainer) -> None:
        """Removes the states of all ranks from a checkpoint, and keeps this rank's until training starts."""
        if "loops" not in checkpoint or not is_fitting(trainer):
            return
        loops = checkpoint["loops"]["fit_loop"]
        progress = loops["epoch_loop.batch_progress"]
        states = checkpoint.pop(CHECKPOINT_KEY, {"ranks": []})["ranks"]
        if len(states) == trainer.world_size:
            state = states[trainer.global_rank]
        else:
            # Checkpoints without our key, and those of another number of ranks: only the number of batches is known.
            loaders = [{STATE_KEY: True, "num_batches": progress["current"]["processed"]}]
            state = {"random_state": None, "module": None, "loaders": loaders, "other_loaders": []}
            if states:
                rank_zero_warn(
                    f"The checkpoint was saved by {len(states)} processes and is resumed by {trainer.world_size}:"
                    " random states are not restored, averages over the epoch cover only the rest of it, and the epoch"
                    " resumes after the same number of batches, with data split differently."
                )
        if state["other_loaders"]:
            loops["state_dict"]["combined_loader"] = state["other_loaders"]
        if progress["is_last_batch"] or _epoch_is_over(loops):  # the next epoch starts at its first batch
            state |= {"loaders": [{**loader, "is_done": True} for loader in state["loaders"]], "module": None}
        self._loaded = state

    def forget(self) -> None:
        """Drops the state that :meth:`take_from` kept for a run that did not start to train."""
        self._loaded = None

    def process_dataloader(self, loader: Any, trainer: L.Trainer) -> Any:
        """A resumable copy of ``loader``, at the position that the checkpoint has for it."""
        if not is_fitting(trainer):
            return loader
        loader = resumable(loader)  # validation's too: it draws no random numbers before its first batch
        if self._loaded is not None and trainer.training and isinstance(loader, ResumableDataLoader):
            if self._loaded["loaders"]:
                loader.load_state_dict(self._loaded["loaders"].pop(0))
            set_random_state(self._loaded["random_state"])  # a loader of unknown length is started before training is
        return loader

    def on_train_start(self, trainer: L.Trainer) -> None:
        """Restores the state that :meth:`take_from` kept."""
        self._step_start = self._before_validation = None
        if self._loaded is None:
            return
        module: Any = trainer.lightning_module
        if self._loaded["module"] is not None and hasattr(module, "load_rank_state_dict"):
            module.load_rank_state_dict(self._loaded["module"])
        if _random_state_before_fetch(trainer) is None:
            set_random_state(self._loaded["random_state"])
        self._loaded = None


def is_fitting(trainer: L.Trainer) -> bool:
    """Whether ``trainer.fit`` is running, its validation included."""
    return trainer.state.fn == TrainerFn.FITTING


def _state(trainer: L.Trainer, before: dict[str, Any] | None) -> dict[str, Any]:
    """The current state of this rank, with the random state of ``before`` if there is one."""
    save: Any = getattr(trainer.lightning_module, "rank_state_dict", lambda: None)
    return {"random_state": before or random_state(), "module": save()}


def _random_state_before_fetch(trainer: L.Trainer) -> dict[str, Any] | None:
    """The random state before the current batch was fetched; None if no loader knows it."""
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    ours = (loader for loader in loaders if isinstance(loader, ResumableDataLoader))
    return next((loader.random_state_before_fetch for loader in ours), None)


def _num_batches_since_step(trainer: L.Trainer, num_processed: int) -> int:
    """How many of the processed batches came after the last optimizer step; the last batch of an epoch ends a step."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    is_last = progress.is_last_batch or progress.current.ready == trainer.num_training_batches
    if is_last and progress.current.ready == num_processed:
        return 0
    return num_processed % trainer.accumulate_grad_batches


# The keys of a checkpoint's loops are Lightning's: a renamed one is a KeyError when a checkpoint is saved or loaded.


def _epoch_is_over(loops: dict[str, Any]) -> bool:
    epochs = loops["epoch_progress"]["current"]
    return epochs["processed"] == epochs["ready"]


def _rewind(loops: dict[str, Any], num_batches: int) -> None:
    """Removes the last batches from the progress that Lightning saves."""
    progress = loops["epoch_loop.batch_progress"]
    # A batch that is "processed" in a checkpoint saved at its end counts as completed and stepped when it is resumed.
    is_at_batch_end = progress["current"]["completed"] < progress["current"]["processed"]
    for counts in (progress["total"], progress["current"]):
        for name in counts:
            counts[name] -= num_batches
    if is_at_batch_end and num_batches:
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
