"""Fault tolerance of strategies, with one switch: atomic checkpoints, exact resuming, graceful shutdown on SIGTERM."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.fabric.plugins import CheckpointIO

from liger_ops.arguments import check_path, wrong_value
from lightning_liger.resuming.atomic_io import atomic_by_default, fail_together, save_on_all_ranks
from lightning_liger.resuming.rank_state import RankStates
from lightning_liger.resuming.safe_loading import check_checkpoint, check_is_of_trainer, sharded_errors_explained
from lightning_liger.resuming.sigterm import GracefulShutdown
from lightning_liger.strategies.parts.checked import CheckedArguments

if TYPE_CHECKING:
    from lightning.fabric.strategies import Strategy as _FabricStrategy
    from lightning.pytorch.strategies import Strategy as _TrainerStrategy

    _Strategy = Any
else:
    _FabricStrategy = _TrainerStrategy = _Strategy = object


class _FaultTolerance(CheckedArguments, _Strategy):
    """The switch, and checkpoint plugins that write atomically. A mixin for strategies of Trainer and Fabric.

    Args:
        fault_tolerance: Whether checkpoints are atomic and hold what every rank needs to resume in the middle of an
            epoch, and SIGTERM ends all ranks at the same batch. False leaves all of it to Lightning.
    """

    _checkpoint_io: CheckpointIO | None

    def __init__(self, *args: Any, fault_tolerance: bool = True, **kwargs: Any) -> None:
        if not isinstance(fault_tolerance, bool):
            raise wrong_value("fault_tolerance", "True or False", fault_tolerance)
        self.fault_tolerance = fault_tolerance
        super().__init__(*args, **kwargs)

    @property
    def _classes_in_checkpoints(self) -> tuple[type, ...]:
        """Further classes that checkpoints of the strategy consist of."""
        return ()

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's plugin, by default one that writes atomically."""
        if not self.fault_tolerance:
            return super().checkpoint_io
        self._checkpoint_io = atomic_by_default(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if self.fault_tolerance:
            self._checkpoint_io = io
        else:  # Lightning's strategies for FSDP and FSDP2 in Fabric refuse plugins
            lightnings: Any = super(_FaultTolerance, type(self))
            lightnings.checkpoint_io.fset(self, io)


class TrainerFaultTolerance(_FaultTolerance, _TrainerStrategy):
    """Saves atomic checkpoints, resumes exactly, shuts down gracefully. A mixin for the Trainer's strategies.

    Checkpoints are atomic, and an error on one rank while saving is an error on all. They also hold the state of each
    rank (see :class:`~lightning_liger.resuming.rank_state.RankStates`), so that a resumed run reproduces the
    uninterrupted run, on CPUs bit for bit; data loaders resume in the middle of an epoch, and validation leaves the
    random states of training unchanged. On SIGTERM training stops gracefully (see
    :class:`~lightning_liger.resuming.sigterm.GracefulShutdown`).

    Args:
        fault_tolerance: Whether to do so. With False checkpoints, data loaders and SIGTERM are handled as in Lightning.
            Checkpoints saved with True load with False, and the other way round.

    Raises:
        ValueError: If ``fault_tolerance`` is not a bool.
    """

    _reads_by_itself = False
    """Whether the strategy reads checkpoints without its ``checkpoint_io``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._rank_states = RankStates()
        self._shutdown = GracefulShutdown()
        super().__init__(*args, **kwargs)

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        if self.fault_tolerance:
            self._shutdown.install(trainer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        def save(to: Any) -> None:
            super(TrainerFaultTolerance, self).save_checkpoint(checkpoint, to, storage_options)

        if not self.fault_tolerance:
            save(filepath)
            return
        self._rank_states.add_to(checkpoint, self._trainer)
        path = self.broadcast(filepath)
        if self.saves_folders and storage_options is None:
            save_on_all_ranks(Path(path), save)
        else:
            fail_together(path, lambda: save(path))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint; :mod:`~lightning_liger.resuming.safe_loading` says what is refused."""
        check_path("ckpt_path", checkpoint_path)
        path = self.broadcast(checkpoint_path)
        if self._reads_by_itself:
            check_checkpoint(Path(path), weights_only, self._classes_in_checkpoints)
        with sharded_errors_explained(path):
            checkpoint = super().load_checkpoint(path, weights_only)
        check_is_of_trainer(checkpoint, path)
        if self.fault_tolerance:
            self._rank_states.take_from(checkpoint, self._trainer, path)
        return checkpoint

    def process_dataloader(self, dataloader: Any) -> Any:
        loader = super().process_dataloader(dataloader)
        return self._rank_states.process_dataloader(loader, self._trainer) if self.fault_tolerance else loader

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.fault_tolerance:
            self._rank_states.on_train_start(self._trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.fault_tolerance:
            self._rank_states.on_train_batch_start(batch_idx, self._trainer)
            self._shutdown.agree(self._trainer)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self.fault_tolerance:
            self._rank_states.on_validation_start(self._trainer)

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self.fault_tolerance:
            self._rank_states.on_validation_end()

    def teardown(self) -> None:
        super().teardown()
        self._rank_states.forget()  # of a run that failed, or had nothing left to do, after it loaded its checkpoint

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.fault_tolerance:
            self._shutdown.set_exit_code(exception)

    @property
    def saves_folders(self) -> bool:
        """Whether checkpoints are folders that all ranks write to; a class attribute may override it."""
        return False

    @property
    def _trainer(self) -> L.Trainer:
        assert self.lightning_module is not None  # Lightning connects it before it calls any hook
        return self.lightning_module.trainer


class FabricFaultTolerance(_FaultTolerance, _FabricStrategy):
    """Saves atomic checkpoints. A mixin for Fabric's strategies.

    Checkpoints are atomic, and an error on one rank while saving is an error on all.

    Args:
        fault_tolerance: Whether to do so. With False checkpoints are saved as in Lightning.

    Raises:
        ValueError: If ``fault_tolerance`` is not a bool.
    """

    _writes_by_itself = False
    """Whether the strategy writes and reads files and folders without its ``checkpoint_io``."""

    def save_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> None:
        def save(to: Any) -> None:
            super(FabricFaultTolerance, self).save_checkpoint(to, *args, **kwargs)

        if not self.fault_tolerance:
            save(path)
            return
        path = self.broadcast(path)
        if self._writes_by_itself:
            save_on_all_ranks(Path(path), save)
        else:
            fail_together(path, lambda: save(path))

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint; :mod:`~lightning_liger.resuming.safe_loading` says what is refused."""
        check_path("path", path)
        path = self.broadcast(path)
        if self._writes_by_itself:
            check_checkpoint(Path(path), weights_only, self._classes_in_checkpoints)
        with sharded_errors_explained(path):
            return super().load_checkpoint(path, state, strict, weights_only)
