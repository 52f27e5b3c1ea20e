"""Checks and measures problems."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.cases import Maker, Unavailable
from benchmarks.losses.data import Data
from benchmarks.losses.problems import PROBLEMS, TINY, Call, Problem

OK, WRONG, OUT_OF_MEMORY, FAILED = "ok", "wrong", "out of memory", "failed"
_EPS = torch.finfo(torch.bfloat16).eps
_SLOW_MS = 250.0
_COMPILED = ("compile", "liger")


@dataclass(frozen=True)
class Measurement:
    """One contender at one problem, forward and backward; fields that were not measured are None.

    Attributes:
        problem, title, sizes: Of the problem.
        trained: Whether the head takes a gradient.
        contender: Name of the implementation.
        status: ``"ok"``, ``"wrong"`` (measured, but its value or gradients differ from float32's), ``"out of memory"``
            or ``"failed"``.
        error: What was wrong, or the first line of the error.
        wall_ms, gpu_ms: Median milliseconds from step to step, and of GPU kernels.
        peak_mib: Peak memory above that of the inputs, gradients included.
        gradient_error: Largest relative L2 distance of a gradient from that of eager code in float32.
        value_error: Relative distance of the loss.
    """

    problem: str
    title: str
    sizes: str
    trained: bool
    contender: str
    status: str = OK
    error: str | None = None
    wall_ms: float | None = None
    gpu_ms: float | None = None
    peak_mib: float | None = None
    gradient_error: float | None = None
    value_error: float | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Settings:
    """Device, contenders and repeats of a run."""

    device: torch.device
    against: Sequence[str]
    repeats: int = 5
    quick: bool = False


@dataclass(frozen=True)
class _Errors:
    value: float
    gradient: float


class _Truth:
    """The loss and the gradients of eager code in float32, and the errors that bfloat16 makes in the same code."""

    def __init__(self, problem: Problem, data: Data) -> None:
        exact = data.float()
        self.data = data
        self._value, self._gradients = _step(problem.calls["eager"], exact)
        self.eager = self.errors(problem.calls["eager"])

    def errors(self, call: Call) -> _Errors:
        value, gradients = _step(call, self.data)
        distances = [
            ((gradient.float() - truth).norm() / truth.norm()).item()
            for gradient, truth in zip(gradients, self._gradients, strict=True)
        ]
        return _Errors(((value.float() - self._value) / self._value).abs().item(), max(distances))

    def why_wrong(self, errors: _Errors) -> str | None:
        """Rounding in another order may cost four times eager's error, and a few roundings of the result."""
        for name in ("value", "gradient"):
            found, limit = getattr(errors, name), 4 * getattr(self.eager, name) + 4 * _EPS
            if not found <= limit:  # NaN too
                return f"{name} differs by {found:.1e}, eager's by {getattr(self.eager, name):.1e}"
        return None


def _step(call: Call, data: Data) -> tuple[Tensor, tuple[Tensor, ...]]:
    loss = call(data)
    return loss.detach(), torch.autograd.grad(loss, data.leaves)


def measure(names: Sequence[str], settings: Settings, say: Callable[[str], None]) -> Iterator[Measurement]:
    """Every contender at every problem; says which are not available, and goes on after errors."""
    missing: dict[str, str] = {}
    for name in names:
        yield from _measure_problem(name, PROBLEMS[name], settings, missing)
        _free(settings.device)
    for contender, reason in missing.items():
        say(f"{contender} is skipped: {reason}")


def _measure_problem(name: str, problem: Problem, settings: Settings, missing: dict[str, str]) -> Iterator[Measurement]:
    sizes, check_sizes = problem.sizes, problem.check_sizes or problem.sizes
    if settings.quick:
        sizes = check_sizes = TINY
    data = problem.make(Maker(settings.device), sizes, problem.trained)
    truth, no_truth = None, None
    try:
        same = data if check_sizes == sizes else problem.make(Maker(settings.device), check_sizes, problem.trained)
        truth = _Truth(problem, same)
    except torch.OutOfMemoryError:
        no_truth = "not checked: no memory for float32"
    _free(settings.device)
    for contender in _contenders(problem, settings):
        if contender in missing:
            continue
        about = Measurement(name, problem.title, str(sizes), problem.trained, contender)
        try:
            call = _load(problem, contender)
            found: dict[str, Any] = {"error": no_truth}
            if truth is not None:
                errors = truth.errors(call)
                found = {"gradient_error": errors.gradient, "value_error": errors.value}
                wrong = truth.why_wrong(errors)
                found |= {"status": WRONG, "error": wrong} if wrong else {}
            yield dataclasses.replace(about, **found, **_cost(call, data, settings))
        except Unavailable as reason:
            missing[contender] = str(reason)
        except torch.OutOfMemoryError as error:
            yield dataclasses.replace(about, status=OUT_OF_MEMORY, error=_first_line(error))
        except Exception as error:  # a row of the results: the others go on
            yield dataclasses.replace(about, status=FAILED, error=_first_line(error))
        _free(settings.device)


def _contenders(problem: Problem, settings: Settings) -> list[str]:
    names = [name for name in problem.calls if name.startswith("ours")]
    chosen = [name for name in settings.against if name in problem.calls or (name == "compile" and problem.compiled)]
    return names + chosen


def _load(problem: Problem, contender: str) -> Call:
    if contender in _COMPILED:
        torch._dynamo.reset()  # otherwise it stops compiling after a few problems
    if contender == "compile":
        return torch.compile(problem.calls["eager"], dynamic=False)
    return problem.calls[contender]


def _cost(call: Call, data: Data, settings: Settings) -> dict[str, float | None]:
    device = settings.device

    def step() -> object:
        return torch.autograd.grad(call(data), data.leaves)

    step()
    first = timing.wall_ms([step], 1, device)[0]
    repeats = max(2, settings.repeats if first < _SLOW_MS else settings.repeats // 2)
    wall = timing.Spread.of(timing.wall_ms([step], repeats, device)).median
    if device.type != "cuda":
        return {"wall_ms": wall}
    gpu = timing.Spread.of(timing.gpu_ms([step], 2, device)).median
    _free(device)
    return {"wall_ms": wall, "gpu_ms": gpu, "peak_mib": timing.peak_mib(step, device)}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
