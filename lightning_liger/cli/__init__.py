"""``lightning-liger fit --config examples/tiny.yaml``: a yaml file as a whole program.

Errors that tell users about their settings, files or text end the command with the message and the exit code 2; all
others are bugs and keep their traceback.
"""

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
            return _main(args)
        finally:
            if sys.stdout is not None:  # None where the shell has closed it
                sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_ended():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at the end
        return BROKEN_PIPE


def _reader_has_ended() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _main(args: list[str] | None) -> int:
    given = sys.argv[1:] if args is None else args
    silence()
    try:
        if not given or given[0] in ("-h", "--help", "--version"):
            return _without_subcommand(given)
        check_yaml_files(given)
        if given[0] in COMMANDS:
            return run_function(given[0], COMMANDS[given[0]], given[1:])
        _check_subcommand(given[0])
        _train(args)
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):  # Lightning has ended its processes
            return _interrupted()
        if isinstance(ended.__context__, BrokenPipeError):  # rich ends so
            return BROKEN_PIPE
        raise
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
        end(message)
    return 0


def _without_subcommand(args: list[str]) -> int:
    if not args:
        end(f"subcommand is required, one of {', '.join(_names())}\nOptions: {PROGRAM} --help")
    if args[0] == "--version":
        from lightning_liger import __version__

        print(f"{PROGRAM} {__version__}")
    else:
        print(first_level())
    return 0


def _names() -> list[str]:
    names = [name for group in SUBCOMMANDS.values() for name in group]
    return sorted(names, key=lambda name: name in COMMANDS)


def _check_subcommand(name: str) -> None:
    if not name.startswith("-") and name not in _names():
        expected = ", ".join(map(repr, _names()))
        end(f"subcommand must be one of {expected}, got {name!r}{closest(name, _names())}")


def _train(args: list[str] | None) -> None:
    if os.getcwd() not in sys.path:  # modules of users in this folder, as with `python -m`; names of packages win
        sys.path.append(os.getcwd())
    from lightning_liger.cli.training import LigerCLI  # it imports much, which other commands do not need

    LigerCLI(args=args)


def _interrupted() -> int:
    print(f"{PROGRAM}: interrupted", file=sys.stderr)
    return INTERRUPTED


def __getattr__(name: str) -> Any:
    if name == "LigerCLI":
        from lightning_liger.cli.training import LigerCLI

        return LigerCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
