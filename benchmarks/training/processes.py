"""Runs jobs one after another, each in fresh processes, which are started while the job before them runs."""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.training.job import FAILED, Job, Row, merge

WORKER = (sys.executable, "-m", "benchmarks.training.worker")
_GRACE = 20.0


def free_port() -> int:
    """A port on which nothing listens, below those of outgoing connections, which may take any other meanwhile."""
    for port in random.SystemRandom().sample(range(10_000, 20_000), 100):
        with socket.socket() as candidate:
            if candidate.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError("no free port in 10000 to 19999")


class _Processes:
    """The processes of one job, waiting for it."""

    def __init__(self, job: Job, folder: Path, command: Sequence[str], device: str | None) -> None:
        self.job, self.folder = job, folder
        self._processes = []
        for rank in range(job.devices):
            environment = dict(os.environ, PYTHONUNBUFFERED="1")
            if device is not None:
                environment["CUDA_VISIBLE_DEVICES"] = device
            if job.devices > 1:
                # Lightning takes processes with these variables for started from outside.
                environment |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
            with (folder / f"log.{rank}").open("w") as log:
                self._processes.append(
                    subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True)
                )

    def run(self, timeout: float) -> list[Row]:
        """The rows of the job, those of its processes merged."""
        # The port is found only now: the job before this one may have taken it meanwhile.
        task = json.dumps({"job": self.job.to_json(), "out": str(self.folder / "rows"), "port": free_port()})
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(task + "\n")
                process.stdin.close()
            except OSError:
                pass  # it has ended: its log says why
        end = time.monotonic() + timeout
        while any(process.poll() is None for process in self._processes):
            if any(process.poll() is not None for process in self._processes):
                end = min(end, time.monotonic() + _GRACE)  # the others may wait for that one for ever
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        timed_out = all(process.poll() is None for process in self._processes)
        self.stop()
        return self._rows(f"no result within {timeout:g} seconds" if timed_out else None)

    def _rows(self, error: str | None) -> list[Row]:
        written = []
        for rank in range(self.job.devices):
            path = self.folder / f"rows.{rank}"
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            written.append([Row.from_json(json.loads(line)) for line in lines])
        rows = []
        for place, shape in enumerate(self.job.shapes):
            found = [rows[place] for rows in written if len(rows) > place]
            complete = len(found) == self.job.devices or any(row.status != "ok" for row in found)
            if not complete:
                rows.append(self.job.row(*shape, status=FAILED, error=error or self._last_line()))
            else:
                rows.append(merge(found))
            if rows[-1].status != "ok":
                break
        return rows

    def _last_line(self) -> str:
        """The last line that the processes wrote."""
        lines = [
            line.strip()
            for rank in range(self.job.devices)
            for line in (self.folder / f"log.{rank}").read_text(encoding="utf-8", errors="replace").splitlines()
            if line.strip()
        ]
        return lines[-1][:500] if lines else "the process ended without a result"

    def stop(self) -> None:
        for process in self._processes:
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
            if process.poll() is None:
                process.kill()
            process.wait()


def run_jobs(
    jobs: Iterable[Job],
    *,
    in_process: bool = False,
    timeout: float = 570.0,
    command: Sequence[str] = WORKER,
    device: str | None = None,
) -> Iterator[Row]:
    """Rows of each job, as soon as the job has ended.

    Args:
        jobs: In this order.
        in_process: Whether to train in this process: a trial on a CPU without the time that processes take to start.
        timeout: Seconds after which a job is ended.
        command: The program that trains a job.
        device: The GPU of all jobs, as in ``CUDA_VISIBLE_DEVICES`` (default: those of this process).
    """
    waiting = list(jobs)
    if in_process:
        for job in waiting:
            yield from _run_here(job)
        return
    with tempfile.TemporaryDirectory() as folder:
        started: list[_Processes] = []

        def start_next() -> None:
            if waiting:
                place = Path(tempfile.mkdtemp(dir=folder))
                started.append(_Processes(waiting.pop(0), place, command, device))

        try:
            start_next()
            while started:
                start_next()
                yield from started[0].run(timeout)
                started.pop(0)
        finally:
            for processes in started:
                processes.stop()


def _run_here(job: Job) -> list[Row]:
    from benchmarks.training.worker import run_job

    rows: list[Row] = []
    collect: Callable[[Row], None] = rows.append
    run_job(job, collect)
    return rows
