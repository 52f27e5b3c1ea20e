"""Rows of ``lightning-liger doctor``; imports the standard library only, and packaging where it is needed."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_liger.commands.doctor_processes import run, run_probe

GROUPS = ("Packages", "Hardware", "Triton", "Distributed", "Ops")
"""The parts of the table."""

_DISTRIBUTION = "lightning-liger"
_HIDDEN_EXTRAS = {"dev", "docs"}  # not for users
_USES = {
    "peft": "LoRA",
    "deepspeed": "the strategies liger_deepspeed_*",
    "pyarrow": "Parquet files as data",
    "pillow": "images as data",
    "matplotlib": "plots",
    "liger-kernel": "comparisons with it",
}
_MODULES = {"pillow": "PIL"}
"""The modules of packages with another name."""
_MAX_PROCESSES = 8


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        group: One of ``GROUPS``.
        name: What is looked at.
        status: ``"ok"``; ``"slow"``: it works, but something else would be faster; ``"wrong"``; ``"missing"``.
        detail: What was found.
        hint: What to do about it; empty if nothing.
        is_broken: Whether the exit status is 1 for it; what is optional may be missing, old or broken.
    """

    group: str
    name: str
    status: Literal["ok", "slow", "wrong", "missing"]
    detail: str
    hint: str = ""
    is_broken: bool = False


# Packages.


class Needed(NamedTuple):
    """A package that this distribution needs, or that one of its extras does."""

    name: str
    versions: str
    extra: str
    """Empty if it is required."""
    installed: str
    """Its version; empty if there is none."""

    @property
    def module(self) -> str:
        return _MODULES.get(self.name, self.name.replace("-", "_"))


def needed_packages() -> list[Needed]:
    """What the metadata of this distribution names; ImportError without packaging or the metadata."""
    from packaging.requirements import Requirement

    found = []
    for line in metadata.requires(_DISTRIBUTION) or []:
        parsed = Requirement(line)
        extra = str(parsed.marker).rpartition('extra == "')[2].partition('"')[0] if parsed.marker else ""
        if extra not in _HIDDEN_EXTRAS and parsed.name != _DISTRIBUTION:  # an extra that takes another
            found.append(Needed(parsed.name, str(parsed.specifier), extra, _version(parsed.name)))
    return sorted(found, key=lambda each: bool(each.extra))


def check_packages(end: float) -> Iterator[Check]:
    """Versions of packages against what this distribution needs, and whether they can be imported."""
    try:
        packages = needed_packages()
        from packaging.specifiers import SpecifierSet
    except metadata.PackageNotFoundError:
        hint = f"pip install {_DISTRIBUTION}"
        yield Check("Packages", _DISTRIBUTION, "missing", "it is not installed", hint, is_broken=True)
        return
    except ImportError as error:
        yield Check("Packages", "packaging", "missing", str(error), "pip install packaging", is_broken=True)
        return
    errors = _import_errors([each.module for each in packages if each.installed] + ["lightning_liger"], end)

    version = ".".join(map(str, sys.version_info[:3]))
    versions = str(metadata.metadata(_DISTRIBUTION).json.get("requires_python", ""))
    if SpecifierSet(versions).contains(version):
        yield Check("Packages", "python", "ok", version)
    else:
        yield Check("Packages", "python", "wrong", f"{version}; needs {versions}", is_broken=True)
    if problem := errors["lightning_liger"]:
        yield Check("Packages", _DISTRIBUTION, "wrong", problem.text, problem.hint(), is_broken=True)
    else:
        yield Check("Packages", _DISTRIBUTION, "ok", _version(_DISTRIBUTION))
    for each in packages:
        name = f"{each.name} (optional)" if each.extra else each.name
        target = f"{_DISTRIBUTION}[{each.extra}]" if each.extra else f"{each.name}{each.versions}"
        use, is_needed = "", not each.extra
        if each.extra:
            use = f"; extra {each.extra}" + (f", for {_USES[each.name]}" if each.name in _USES else "")
        if not each.installed:
            detail = f"not installed{use or f'; needs {each.versions}'}"
            yield Check("Packages", name, "missing", detail, f"pip install '{target}'", is_broken=is_needed)
        elif not SpecifierSet(each.versions).contains(each.installed, prereleases=True):
            detail = f"{each.installed}; needs {each.versions}{use}"
            yield Check("Packages", name, "wrong", detail, f"pip install '{target}'", is_broken=is_needed)
        elif problem := errors[each.module]:
            hint = problem.hint(f"pip install --force-reinstall --no-deps '{each.name}{each.versions}'")
            yield Check("Packages", name, "wrong", f"{each.installed}; {problem.text}{use}", hint, is_broken=is_needed)
        else:
            yield Check("Packages", name, "ok", f"{each.installed}{use}")


def is_installed(name: str) -> bool:
    """Whether a distribution is installed."""
    return bool(_version(name))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


class _ImportError(NamedTuple):
    """Why a module cannot be imported."""

    module: str
    culprit: str
    """The package that raised the error, maybe the module itself; empty if that is not known."""
    error: str

    @property
    def text(self) -> str:
        return f"import fails: {self.error}"

    def hint(self, own: str = "") -> str:
        """What to do: ``own`` if no other package is at fault."""
        return own if self.culprit in ("", self.module) else f"{self.culprit} is at fault"


def _import_errors(modules: Sequence[str], end: float) -> dict[str, _ImportError | None]:
    """By module why it cannot be imported, None if it can be."""
    errors: dict[str, _ImportError | None] = {}
    while remaining := [module for module in modules if module not in errors]:
        rows, failure = run_probe("imports", *remaining, end=end)
        for row in rows:
            found = _ImportError(row["name"], row["culprit"], row["detail"])
            errors[found.module] = found if found.error else None
        if len(rows) < len(remaining):  # the process died in the next one
            name = remaining[len(rows)]
            errors[name] = _ImportError(name, "", failure or "no result")
    return errors


# The machine.


def check_probe(name: str, end: float) -> Iterator[Check]:
    """The rows of a probe, and one more if it failed."""
    rows, failure = run_probe(name, end=end)
    for row in rows:
        yield Check(**row)
    if failure:
        group = {"gpus": "Hardware", "triton": "Triton"}.get(name, "Distributed")
        title = {"gpus": "GPU", "triton": "compiler", "deepspeed": "DeepSpeed"}[name]
        is_broken = name != "deepspeed"  # which is optional
        yield Check(group, title, "wrong", failure, "see the rows of packages", is_broken=is_broken)


def driver() -> tuple[str, str]:
    """The version of the NVIDIA driver and the first GPU that it sees; both are empty without one."""
    if shutil.which("nvidia-smi") is None:
        return "", ""
    command = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "", ""
    version, _, name = next(iter(done.stdout.splitlines()), "").partition(",")
    return version.strip(), name.strip()


def check_hardware(end: float) -> Iterator[Check]:
    """GPUs, the driver, NCCL and shared memory."""
    version, gpu = driver()
    for check in check_probe("gpus", end):
        if (check.name, check.status) != ("GPU", "missing"):
            yield check
        elif gpu:
            detail = f"torch does not see the {gpu}: it is built for {check.detail}, the driver is {version}"
            hint = "install torch for your driver's CUDA version (pytorch.org/get-started), or a newer driver"
            yield Check("Hardware", "GPU", "wrong", detail, hint, is_broken=True)
        else:
            detail = "none: ops run plain PyTorch. A GPU would run Triton kernels, with NCCL and memory budgets"
            yield Check("Hardware", "GPU", "missing", detail)
    if version:
        yield Check("Hardware", "driver", "ok", version)
    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total / 2**30
        is_small = total < 1
        hint = "data loader workers and NCCL need more: docker run --shm-size=16g, or --ipc=host" if is_small else ""
        yield Check("Hardware", "shared memory", "slow" if is_small else "ok", f"{total:.3g} GiB in {shared}", hint)


# Ops.


def check_ops(end: float) -> list[Check]:
    """Self-checks of all ops; on a GPU several processes share them, because compilation takes most of the time."""
    count = _num_processes()
    with ThreadPoolExecutor(count) as threads:
        parts = list(threads.map(lambda part: list(_test_ops(f"{part}/{count}", end)), range(count)))
    # Each part has every count-th op.
    return [check for group in itertools.zip_longest(*parts) for check in group if check is not None]


def _num_processes() -> int:
    has_gpu = Path("/dev/nvidiactl").exists()
    return min(_MAX_PROCESSES, max(1, (os.cpu_count() or 1) // 2)) if has_gpu else 1


def _test_ops(part: str, end: float) -> Iterator[Check]:
    """The rows of some ops; a process that ends early is followed by one for the ops after the one that it ended in."""
    names = ["--part", part]
    while names:
        rows, failure = run([sys.executable, "-m", "liger_ops.self_check", *names], end)
        if not rows:
            hint = "see the rows of packages"
            yield Check("Ops", "self-checks", "wrong", failure or "no result", hint, is_broken=True)
            return
        first, *results = rows
        ops: list[str] = first["ops"]
        for op, of_op in itertools.groupby(results, key=lambda result: result["op"]):
            yield _describe(op, list(of_op))
            ops.remove(op)
        if time.monotonic() >= end:
            hint = "compiled kernels are cached: run it again"
            yield from (Check("Ops", op, "slow", "not done in time", hint, is_broken=True) for op in ops)
            return
        if ops and (failure or not results):
            yield Check("Ops", ops.pop(0), "wrong", failure or "no result", is_broken=True)
        names = ops


def _describe(op: str, results: Sequence[dict[str, Any]]) -> Check:
    """The row of one op on all devices."""
    wrong = [result for result in results if result["message"]]
    if wrong:
        where = f" ({wrong[0]['device']}, {wrong[0]['dtype']})"
        hint = "report it with the output of lightning-liger doctor --json"
        return Check("Ops", op, "wrong", wrong[0]["message"] + where, hint, is_broken=True)
    worst = max(results, key=lambda result: result["error"] / (result["allowed"] or 1.0))
    path = {"triton": "Triton", "pytorch": "PyTorch"}[worst["path"]]
    devices = f", {len(results)} GPUs" if len(results) > 1 else ""
    error = f"error {worst['error']:.1e} of {worst['allowed']:.1e}"
    return Check("Ops", op, "ok", f"{path}, {worst['dtype']}{devices}: {error}")
