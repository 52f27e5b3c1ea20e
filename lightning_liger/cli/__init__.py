"""``lightning-liger fit --config examples/tiny.yaml``: a yaml file as a whole program.

Errors that tell users about their settings, files or text end the command with the message and the exit code 2; all
others are bugs and keep their traceback.
"""

import importlib
import os
import select
import sys
from typing import TYPE_CHECKING, Any

from lightning_liger.cli.functions import run_function
from lightning_liger.cli.help import SUBCOMMANDS, first_level
from lightning_liger.cli.messages import PROGRAM, closest, end, message_of, silence
from lightning_liger.cli.mistakes import check_yaml_files
from lightning_liger.commands import COMMANDS

if TYPE_CHECKING:
    from lightning_liger.cli.training import LigerCLI

__all__ = ["LigerCLI", "main"]

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells expect it."""
BROKEN_PIPE = 141
"""The exit status after the reader of the output, such as ``head``, has ended."""


def main(args: list[str] | None = None) -> int:
    """Entry point of the ``lightning-liger`` command and of ``python -m lightning_liger``; returns the exit status."""
    try:
        try:
            return _main(sys.argv[1:] if args is None else args)
        finally:
            if sys.stdout is not None:  # None where the shell has closed it
                sys.stdout.flush()
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):  # of another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at the end
        return BROKEN_PIPE


def _main(given: list[str]) -> int:
    silence()
    names = sorted((name for group in SUBCOMMANDS.values() for name in group), key=lambda name: name in COMMANDS)
    try:
        if not given:
            end(f"subcommand is required, one of {', '.join(names)}\nOptions: {PROGRAM} --help")
        if given[0] == "--version":
            print(f"{PROGRAM} {importlib.import_module('lightning_liger').__version__}")
            return 0
        if given[0] in ("-h", "--help"):
            print(first_level())
            return 0
        check_yaml_files(given)
        if given[0] in COMMANDS:
            return run_function(given[0], COMMANDS[given[0]], given[1:])
        if not given[0].startswith("-") and given[0] not in names:
            expected = ", ".join(map(repr, names))
            end(f"subcommand must be one of {expected}, got {given[0]!r}{closest(given[0], names)}")
        if os.getcwd() not in sys.path:  # modules of users in this folder, as with `python -m`; names of packages win
            sys.path.append(os.getcwd())
        cli = importlib.import_module("lightning_liger.cli.training").LigerCLI  # it imports much
        cli(args=None if given == sys.argv[1:] else given)  # Lightning warns if it gets both
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich ends so
            return BROKEN_PIPE
        # Lightning has ended its processes, and exits.
        if not isinstance(ended, KeyboardInterrupt) and not isinstance(ended.__context__, KeyboardInterrupt):
            raise
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
        end(message)
    return 0


def __getattr__(name: str) -> Any:
    if name == "LigerCLI":
        return importlib.import_module("lightning_liger.cli.training").LigerCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
