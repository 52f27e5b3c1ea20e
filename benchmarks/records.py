"""Files of results in JSON lines: the environment, then one line for each measurement."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple, Protocol


@dataclasses.dataclass(frozen=True)
class Record:
    """One contender's measurement of one op at one shape in one direction.

    A field is None if the machine cannot measure it or the direction does not have it. A backward direction is the
    difference of ``both`` and ``forward``, so it has medians only.

    Attributes:
        op: Name of the op.
        suite: ``"shapes"``, compared with the floor, or ``"sweep"``, drawn in figures.
        shape: The shape as text, for tables.
        size: The size that varies in a sweep.
        dtype: Dtype of the inputs.
        contender: Name of the implementation.
        pass_: ``"forward"``, ``"backward"`` or ``"both"``; ``"pass"`` in JSON.
        gpu_ms, gpu_ms_quartiles: Milliseconds of GPU kernels.
        wall_ms, wall_ms_quartiles: Milliseconds from step to step, or of a step in turns with others.
        peak_mib: Peak memory above what was allocated before the step, gradients included.
        inputs_mib: Memory of the inputs and the incoming gradients.
        floor_ms: Milliseconds of the least work that any implementation must do, at the best rate measured on the GPU.
        ratio: ``gpu_ms / floor_ms``.
        gradient_error: On a small problem, the largest relative L2 distance of a gradient from float64's.
        host_us: On a small problem, microseconds of a forward and backward.
        first_call_s: Seconds of the first forward and backward of this op in the process, compilation included.
    """

    op: str
    suite: str
    shape: str
    size: int | None
    dtype: str
    contender: str
    pass_: str
    gpu_ms: float | None
    gpu_ms_quartiles: tuple[float, float] | None
    wall_ms: float
    wall_ms_quartiles: tuple[float, float] | None
    floor_ms: float | None
    ratio: float | None
    peak_mib: float | None = None
    inputs_mib: float | None = None
    gradient_error: float | None = None
    host_us: float | None = None
    first_call_s: float | None = None

    @property
    def time_ms(self) -> float:
        """GPU time, or wall time without a GPU."""
        return self.wall_ms if self.gpu_ms is None else self.gpu_ms

    @property
    def total_gib(self) -> float | None:
        """Peak memory, inputs included."""
        return None if self.peak_mib is None else (self.peak_mib + self.inputs_mib) / 1024

    def to_json(self) -> str:
        return json.dumps({name.rstrip("_"): value for name, value in dataclasses.asdict(self).items()})

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Record":
        return cls(**{"pass_" if name == "pass" else name: value for name, value in values.items()})


class _HasJSON(Protocol):
    def to_json(self) -> str: ...


class Line(dict[str, Any]):
    """A measurement without a class."""

    def to_json(self) -> str:
        return json.dumps(self)


class Writer:
    """Writes each record at once, so that an interrupted run leaves those it has measured.

    Args:
        path: The file.
        environment: Device and versions.
        command: The command of ``python -m benchmarks`` that measures; None for those that write :class:`Record`.
        append: Whether to add to a file that exists, with another line of the environment if it differs from the first.
    """

    def __init__(
        self, path: Path, environment: dict[str, Any], command: str | None = None, *, append: bool = False
    ) -> None:
        goes_on = append and path.exists() and read_results(path).environment == environment
        self._file = path.open("a" if append else "w", encoding="utf-8")
        if not goes_on:
            first = {"environment": environment} | ({"command": command} if command else {})
            self._file.write(json.dumps(first) + "\n")

    def write(self, record: _HasJSON) -> None:
        self._file.write(record.to_json() + "\n")
        self._file.flush()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Results(NamedTuple):
    """The content of a file that a command wrote."""

    command: str | None
    """The command, None for ``ops`` and ``loss``."""
    environment: dict[str, Any]
    """Device and versions, in the file's first line."""
    lines: list[dict[str, Any]]
    """One for each measurement."""


def read_results(path: Path) -> Results:
    """The content of a file that a command wrote.

    Raises:
        ValueError: If ``path`` holds anything else.
    """
    try:
        first, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        lines = [line for line in lines if "environment" not in line]  # of another machine, or another day
        return Results(first.get("command"), first["environment"], lines)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not hold records of python -m benchmarks: {error}") from error


def read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """The environment and the records of a file that ``ops`` or ``loss`` wrote.

    Raises:
        ValueError: If ``path`` holds anything else.
    """
    results = read_results(path)
    try:
        return results.environment, [Record.from_json(line) for line in results.lines]
    except TypeError as error:
        raise ValueError(f"{path} does not hold records of python -m benchmarks: {error}") from error
