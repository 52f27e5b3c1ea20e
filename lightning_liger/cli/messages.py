"""Mistakes of users in one paragraph on stderr, and the exit code 2."""

import difflib
import logging
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterable
from typing import Any, NoReturn

PROGRAM = "lightning-liger"

_PACKAGES = {
    *("__main__", "lightning_liger", "liger_ops", "lightning", "lightning_utilities", "jsonargparse"),
    *("transformers", "huggingface_hub", "datasets", "contextlib", "functools", "os", "pathlib", "fsspec"),
}
"""Code that tells users about their input."""
_WARNINGS = (
    # What Lightning calls in torch:
    r".*isinstance\(treespec, LeafSpec\).*",
    r"CUDA is not available or torch_xla is imported\. Disabling autocast",  # FSDP on CPUs
    # What torch calls in itself, when FSDP saves shards or gathers:
    r"`_get_pg_default_device` will be deprecated",
    r"Multiple backends are registered with this ProcessGroup",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
    r"`torch\.distributed\.\w+` is deprecated\. Please use `torch\.distributed\.\w+` instead",
)
_LOGGED = {
    "lightning.pytorch.utilities.rank_zero": ("litlogger", "TPU available: False"),
    "DeepSpeed": ("Setting accelerator to CPU",),  # where it is installed, whatever the command
}
"""By logger, parts of messages. Of these and the warnings, users can do nothing about any."""


def silence() -> None:
    """Leaves out what other packages say about themselves."""
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in _LOGGED:
        logging.getLogger(name).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not any(part in record.getMessage() for part in _LOGGED[record.name])


def end(message: str) -> NoReturn:
    """Prints the message and ends the command with the exit code 2."""
    rank_zero: Any = sys.modules.get("lightning_utilities.core.rank_zero")
    rank = rank_zero and getattr(rank_zero.rank_zero_only, "rank", None)  # several processes may find the same mistake
    text = f"{PROGRAM}: error: {f'[rank {rank}] ' if rank else ''}{message}"
    if sys.stderr.isatty():
        wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns)
        wrapper.break_long_words = wrapper.break_on_hyphens = False
        text = "\n".join(map(wrapper.fill, text.split("\n")))
    print(text, file=sys.stderr)
    sys.exit(2)


def closest(name: str, names: Iterable[str]) -> str:
    """`` (did you mean ...?)`` with the most similar name, or nothing if none is similar."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1)
    close = close or [each for each in known if len(name) > 2 and name.lower() in each.lower()]
    return f" (did you mean {close[0]!r}?)" if close else ""


def message_of(error: BaseException) -> str | None:
    """What ``error`` tells users about their input; None if it may be a bug, in this program or in their code.

    It is about their input if a ``raise`` statement or a file made it, either while the objects that the settings
    describe are made, or in code that no code of users called.
    """
    text = in_one_line(str(error))
    while error.__cause__ is not None and _callers(error)[-1] == "jsonargparse":  # which adds all settings to the text
        error = error.__cause__
        if _callers(error)[-1] != "jsonargparse":
            text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    is_check = (frames[-1].line or "").startswith("raise") or (isinstance(error, OSError) and error.filename)
    is_setting = frames[-1].name == "load_state_dict" or any(frame.name == "instantiate_classes" for frame in frames)
    return " ".join(text.split()) if is_check and (is_setting or set(_callers(error)) <= _PACKAGES) else None


def _callers(error: BaseException) -> list[str]:
    """The packages whose code ran when ``error`` was raised, the one that raised it last."""
    frames = traceback.walk_tb(error.__traceback__)
    return [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames] or [""]


def in_one_line(message: str) -> str:
    """A message of jsonargparse in one line: of a list of reasons, those that are not about another type."""
    first, *lines = (line.strip() for line in message.strip().splitlines())
    listed = [line for line in lines if line.startswith("- ")]
    reasons = [line[2:] for line in listed if not line.startswith(("- Expected ", "- Does not validate"))]
    if not reasons:
        return " ".join(message.split())
    given = [f"got {line[13:]}" for line in lines if line.startswith("Given value: ") and len(line) < 93]
    return ", ".join([f"{'' if first.startswith('Does not') else first} {'; '.join(reasons)}".strip(), *given])
