"""``lightning-liger fit --config examples/tiny.yaml``: a yaml file as a whole program.

Errors that tell users about their settings, files or text end the command with the message and the exit code 2; all
others are bugs and keep their traceback.
"""

import sys
import warnings
from typing import TYPE_CHECKING, Any

from lightning_liger.cli.functions import run_function
from lightning_liger.cli.messages import end, message_of
from lightning_liger.commands import COMMANDS

if TYPE_CHECKING:
    from lightning_liger.cli.training import LigerCLI

__all__ = ["LigerCLI", "main"]


def main(args: list[str] | None = None) -> int:
    """Entry point of the ``lightning-liger`` command and of ``python -m lightning_liger``; returns the exit status."""
    given = sys.argv[1:] if args is None else args
    try:
        if given and given[0] in COMMANDS:
            return run_function(given[0], COMMANDS[given[0]], given[1:])
        _train(args)
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
        end(message)
    return 0


def _train(args: list[str] | None) -> None:
    # Raised by Lightning 2.6 itself: users cannot act on it.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    from lightning_liger.cli.training import LigerCLI  # it imports much, which other commands do not need

    LigerCLI(args=args)


def __getattr__(name: str) -> Any:
    if name == "LigerCLI":
        from lightning_liger.cli.training import LigerCLI

        return LigerCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
