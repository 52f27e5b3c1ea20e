"""How strategies save and load checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from liger_ops.arguments import check_bool, check_path
from lightning_liger.resuming.atomic_io import atomic_by_default, fail_together, replace
from lightning_liger.resuming.safe_loading import check_checkpoint, loading_safely


class Checkpoints:
    """Saves and loads the checkpoints of a strategy.

    Saving is atomic, and an error on one rank is an error on all, unless ``fault_tolerance`` is False.
    """

    writes_itself = False
    """Whether Lightning's strategy writes files and folders without its ``checkpoint_io``."""
    are_sharded = False
    """Whether Lightning's strategy reads files itself, into sharded models."""
    classes: Callable[[], tuple[type, ...]] = tuple
    """Those that files consist of besides PyTorch's."""

    def __init__(self, strategy: Any, fault_tolerance: bool, io: CheckpointIO | None) -> None:
        check_bool("fault_tolerance", fault_tolerance)
        self._strategy = strategy
        self.io = atomic_by_default(io)

    def save(self, path: Any, save: Callable[[Any], None]) -> None:
        """Calls Lightning's ``save`` with a path to write to."""
        if not self._strategy.fault_tolerance:
            save(path)
            return
        path = self._strategy.broadcast(path)
        if self.writes_itself:
            replace(Path(path), save, on_all_ranks=True)
        else:
            fail_together(path, lambda: save(path))

    def load(self, argument: str, path: Any, weights_only: bool | None, read: Callable[[Any], Any]) -> Any:
        """What ``read`` returns for a path that is the value of ``argument``, once it is known to run no code."""
        check_path(argument, path)
        path = self._strategy.broadcast(path)
        if self.are_sharded:
            check_checkpoint(Path(path), weights_only)
        with loading_safely(path, weights_only, self.classes()):
            return read(path)
