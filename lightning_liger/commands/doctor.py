"""``lightning-liger doctor``: what works on this machine, what does not, and how to get it.

Imports the standard library only, and runs what imports other packages in separate processes: a package that is broken
is a row of the table.
"""

import json as json_module
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from lightning_liger.commands.doctor_checks import (
    GROUPS,
    Check,
    check_hardware,
    check_ops,
    check_packages,
    check_probe,
    is_installed,
)
from lightning_liger.commands.doctor_processes import stop

TIME_LIMIT = 55.0
"""Seconds after which processes that are not done are ended."""

_COLORS = {"ok": "green", "slow": "yellow", "wrong": "bold red", "missing": "cyan"}


def run_doctor(*, json: bool = False) -> int:
    """Check this machine: versions, GPUs, Triton's compiler, NCCL, DeepSpeed, and each op against plain PyTorch.

    Takes up to a minute, and changes nothing but Triton's cache of compiled kernels. The exit status is 0 if everything
    that is needed works, and 1 if something is broken; optional packages do not count. A row is ok, slow (it works, but
    something else would be faster), wrong or missing.

    Args:
        json: Print one JSON object instead of a table.
    """
    start = time.perf_counter()
    with _waiting():
        checks = examine()
    seconds = time.perf_counter() - start
    status = int(any(check.is_broken for check in checks))
    if json:
        rows = [asdict(check) for check in checks]
        print(json_module.dumps({"exit_status": status, "seconds": round(seconds, 1), "checks": rows}, indent=2))
    else:
        _print(checks, seconds)
    return status


def examine(time_limit: float = TIME_LIMIT) -> list[Check]:
    """The rows of the table; ``time_limit`` is in seconds."""
    end = time.monotonic() + time_limit
    with ThreadPoolExecutor() as threads:
        parts = [
            threads.submit(lambda: list(check_packages(end))),
            threads.submit(lambda: list(check_hardware(end))),
            threads.submit(lambda: list(check_probe("triton", end))),
            threads.submit(check_ops, end),
        ]
        if is_installed("deepspeed"):
            parts.append(threads.submit(lambda: list(check_probe("deepspeed", end))))
        try:
            checks = [check for part in parts for check in part.result()]
        except KeyboardInterrupt:
            stop()
            raise
    return sorted(checks, key=lambda check: GROUPS.index(check.group))


def _waiting() -> AbstractContextManager[Any]:
    """Shows on a terminal that something happens."""
    try:
        from rich.console import Console
    except ImportError:  # its row says so
        return nullcontext()
    console = Console(stderr=True)
    return console.status("Looking at this machine, for up to a minute ...") if console.is_terminal else nullcontext()


def _print(checks: Sequence[Check], seconds: float) -> None:
    broken = [check.name for check in checks if check.is_broken]
    verdict = f"{len(broken)} broken: {', '.join(broken)}" if broken else "Everything that is needed works."
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:  # its row says so
        for check in checks:
            hint = f" -> {check.hint}" if check.hint else ""
            print(f"{check.group:12} {check.status:8} {check.name}: {check.detail}{hint}")
        print(f"{verdict} ({seconds:.0f} s)")
        return
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for group in GROUPS:
        rows = [check for check in checks if check.group == group]
        if rows:
            table.add_row(f"[bold]{group}[/bold]")
        for check in rows:
            detail = escape(check.detail) + (f"\n[bold]→ {escape(check.hint)}[/bold]" if check.hint else "")
            table.add_row(f"  {escape(check.name)}", f"[{_COLORS[check.status]}]{check.status}[/]", detail)
    console.print(table)
    console.print(f"\n[bold {'red' if broken else 'green'}]{escape(verdict)}[/] ({seconds:.0f} s)")
