"""Processes in which ``lightning-liger doctor`` runs what may crash or hang; imports the standard library only."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_WITHOUT_INIT = (
    "import sys; from importlib.util import find_spec, module_from_spec;"
    "sys.modules['lightning_liger'] = module_from_spec(find_spec('lightning_liger'));"
    "from lightning_liger.commands.doctor_probes import main; main()"
)
"""The probes without the package's __init__, which imports most packages."""


_running: set["subprocess.Popen[str]"] = set()
_stopped = threading.Event()


def stop() -> None:
    """Ends all processes, and makes :func:`run` start no more."""
    _stopped.set()
    for process in tuple(_running):
        _kill(process)


def _kill(process: "subprocess.Popen[str]") -> None:
    """Ends a process and those that it started, such as compilers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_probe(name: str, *arguments: str, end: float) -> tuple[list[dict[str, Any]], str]:
    """The rows of a probe of ``doctor_probes``, and why it ended early; see :func:`run`."""
    return run([sys.executable, "-c", _WITHOUT_INIT, name, *arguments], end)


def run(command: Sequence[str], end: float) -> tuple[list[dict[str, Any]], str]:
    """Runs a command that prints lines of JSON.

    Args:
        command: The program and its arguments.
        end: When it is killed, in seconds of ``time.monotonic``.

    Returns:
        The objects that it printed, and why it failed: its last words, or its signal; empty if it did not.
    """
    if _stopped.is_set():
        return [], "interrupted"
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        _running.add(process)
        try:
            process.wait(max(0.0, end - time.monotonic()))
            failure = ""
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
            failure = "no result in time"
        finally:
            _running.discard(process)
        output.seek(0)
        errors.seek(0)
        rows = [json.loads(line) for line in output if line.startswith("{") and line.endswith("}\n")]
        if not failure and process.returncode < 0:
            failure = f"the process died: {signal.Signals(-process.returncode).name}"
        elif not failure and process.returncode > 0:
            lines = [line.strip() for line in errors if line.strip()]
            failure = lines[-1][:300] if lines else f"exit status {process.returncode}"
        return rows, failure


def _environment() -> dict[str, str]:
    """With the folders of both packages, wherever this process found them."""
    folders = []
    for package in ("lightning_liger", "liger_ops"):
        spec = find_spec(package)
        folders += [str(Path(folder).parent) for folder in (spec and spec.submodule_search_locations) or ()]
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *([given] if given else [])])}
