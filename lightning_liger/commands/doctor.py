"""``lightning-liger doctor``: what works on this machine, what does not, and how to get it.

Imports the standard library only. Other packages are imported in other processes: one that crashes is a row.
"""

import importlib
import itertools
import json as json_module
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

TIME_LIMIT = 55.0  # seconds after which processes that are not done are ended
_DISTRIBUTION = "lightning-liger"
_GROUPS = ("Packages", "Hardware", "Triton", "Distributed", "Ops")
_COLORS = {"ok": 32, "slow": 33, "wrong": 31, "missing": 36}
_MODULES = {"pillow": "PIL", "pyyaml": "yaml"}  # of packages with another name
# As a script this file would put its folder, which has modules named as those of Python, before all others.
_RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
_DIED = "; import fails: "  # ends a row of which the process that yields it may die
_GIB = 2**30
_interrupted = threading.Event()


@dataclass(frozen=True)
class Check:
    """One row of the table; what is optional may be missing or broken without making the exit status 1."""

    group: str
    name: str
    status: Literal["ok", "slow", "wrong", "missing"]
    detail: str
    hint: str = ""
    is_broken: bool = False


def run_doctor(*, json: bool = False) -> int:
    """Check this machine: versions, GPUs, Triton's compiler, NCCL, DeepSpeed, and each op against plain PyTorch.

    Takes up to a minute, and writes only to Triton's cache of compiled kernels. The exit status is 0 if everything
    required works, and 1 if something is broken; optional packages do not count. A row is ok, slow (it works, but
    another setup would be faster), wrong or missing.

    Args:
        json: Print one JSON object instead of a table.
    """
    if sys.stderr.isatty():
        print("Checking this machine, for up to a minute ...", file=sys.stderr)
    start = time.monotonic()
    checks = examine(start + TIME_LIMIT)
    seconds, broken = time.monotonic() - start, [check.name for check in checks if check.is_broken]
    status = int(bool(broken))
    if json:
        report = {"exit_status": status, "seconds": round(seconds, 1), "checks": [asdict(check) for check in checks]}
        print(json_module.dumps(report, indent=2))
        return status
    width = 2 + max(len(check.name) for check in checks)
    for group, group_checks in itertools.groupby(checks, lambda check: check.group):
        print(group)
        for check in group_checks:
            color, plain = (f"\033[{_COLORS[check.status]}m", "\033[0m") if sys.stdout.isatty() else ("", "")
            hint = f"\n{' ' * (width + 11)}-> {check.hint}" if check.hint else ""
            print(f"  {check.name:{width}}{color}{check.status:9}{plain}{check.detail}{hint}")
    verdict = f"{len(broken)} broken: {', '.join(broken)}" if broken else "Everything required works."
    print(f"\n{verdict} ({seconds:.0f} s)")
    return status


def examine(end: float) -> list[Check]:
    """The rows of the table, as far as they are known at ``end`` in seconds of ``time.monotonic``."""
    with ThreadPoolExecutor() as threads:
        parts = [threads.submit(probe, name, end) for name in ("packages", "machine")]
        parts.append(threads.submit(check_ops, end))
        try:
            return sorted((each for part in parts for each in part.result()), key=lambda row: _GROUPS.index(row.group))
        except KeyboardInterrupt:  # the processes have it too
            _interrupted.set()
            raise


def probe(name: str, end: float) -> list[Check]:
    """The rows of ``packages`` or of ``machine``, which run in other processes: each goes on where one has died."""
    found: dict[str, Check] = {}
    while True:
        rows, failure = run([sys.executable, "-c", _RUN, __file__, name, str(len(found))], end)
        found |= {row["name"]: Check(**row) for row in rows}
        if not failure:
            return list(found.values())
        if not rows or not rows[-1]["detail"].endswith(_DIED):
            group = "Packages" if name == "packages" else "Hardware"
            return [*found.values(), Check(group, "process", "wrong", failure, "see the rows on packages", True)]
        last, check = found.popitem()
        found[last] = replace(check, detail=f"{check.detail}{failure}")


def run(command: Sequence[str], end: float) -> tuple[list[dict[str, Any]], str]:
    """The objects that a command prints as lines of JSON until ``end``, and why it failed; empty if it did not."""
    if _interrupted.is_set():
        return [], "interrupted"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # both packages are found
    seconds, failure = max(0.0, end - time.monotonic()), ""
    done: Any
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
        if done.returncode < 0:
            failure = f"the process died: {signal.Signals(-done.returncode).name}"
        elif done.returncode > 0:
            failure = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300] or "no output"
    except subprocess.TimeoutExpired as late:
        done, failure = late, "no result in time"
    lines = (done.stdout or b"").splitlines(keepends=True)
    return [json_module.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}\n")], failure


def packages(first: int) -> Iterator[Check]:
    """Versions of packages against what is needed, and imports, each after a row that stays if the process dies."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in metadata.requires(_DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        yield Check("Packages", _DISTRIBUTION, "missing", "not installed", f"pip install {_DISTRIBUTION}", True)
        return
    if not first:
        yield Check("Packages", "python", "ok", sys.version.split()[0])
    needed = [("", Requirement(_DISTRIBUTION))]
    for each in requirements:
        extra = str(each.marker).rpartition('extra == "')[2].partition('"')[0] if each.marker else ""
        if extra not in ("dev", "docs") and each.name != _DISTRIBUTION:  # an extra that takes another
            needed.append((extra, each))
    installed = {each.name.lower().replace("_", "-"): each.version for each in metadata.distributions()}
    for extra, each in sorted(needed, key=lambda package: bool(package[0]))[max(0, first - 1) :]:
        title, use = (f"{each.name} (optional)", f"; extra {extra}") if extra else (each.name, "")
        package, name = f"'{each.name}{each.specifier}'", each.name.lower().replace("_", "-")
        version, module = installed.get(name, ""), _MODULES.get(name, name.replace("-", "_"))
        row = partial(Check, "Packages", title)
        if not version or not each.specifier.contains(version, prereleases=True):
            detail = f"{version or 'not installed'}; needs {each.specifier or 'any version'}{use}"
            hint = f"pip install '{_DISTRIBUTION}[{extra}]'" if extra else f"pip install {package}"
            yield row("wrong" if version else "missing", detail, hint, not extra)
            continue
        broken = partial(row, "wrong", hint=f"pip install --force-reinstall --no-deps {package}", is_broken=not extra)
        yield broken(f"{version}{use}{_DIED}")
        try:
            importlib.import_module(module)
            yield row("ok", f"{version}{use}")
        except Exception as raised:  # whatever a broken package raises
            walked = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(raised.__traceback__)]
            callers = [caller.partition(".")[0] for caller in reversed(walked)]
            culprit = next((caller for caller in callers if caller not in ("importlib", "__main__")), module)
            found = broken(f"{version}{use}{_DIED}{_one_line(raised)}")
            yield found if culprit == module else replace(found, hint=f"{culprit} is at fault")


def machine() -> Iterator[Check]:
    """Shared memory, the driver, and what torch, NCCL, Triton and DeepSpeed see."""
    if (shared := Path("/dev/shm")).is_dir():
        total = shutil.disk_usage(shared).total / _GIB
        hint = "" if total >= 1 else "data loader workers and NCCL need more: docker run --shm-size=16g, or --ipc=host"
        yield Check("Hardware", "shared memory", "slow" if hint else "ok", f"{total:.3g} GiB in {shared}", hint)
    command = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    driver = gpu = ""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        driver, _, gpu = done.stdout.partition("\n")[0].partition(", ")
        yield Check("Hardware", "driver", "ok", driver)

    import torch
    import torch.distributed as dist

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpu and not count:
        detail = f"torch does not see the {gpu}: it is built for {built_for}, the driver is {driver}"
        hint = "install torch for your driver's CUDA version (pytorch.org/get-started), or a newer driver"
        yield Check("Hardware", "GPU", "wrong", detail, hint, is_broken=True)
    elif not count:
        yield Check("Hardware", "GPU", "missing", "none: ops run plain PyTorch. A GPU would run Triton kernels")
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        free, total = (size / _GIB for size in torch.cuda.mem_get_info(index))
        detail = f"{found.name}, compute capability {found.major}.{found.minor}, {total:.1f} GiB, {free:.0f} GiB free"
        hint = "" if found.major >= 8 else "it does not support bfloat16: use precision 16-mixed or 32-true"
        yield Check("Hardware", f"GPU {index}", "slow" if hint else "ok", detail, hint)
    yield Check("Hardware", "torch built for", "ok", built_for)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count and dist.is_nccl_available() else ""
    detail = nccl or ("this build of torch has none" if count else "needs GPUs")
    yield Check("Distributed", "NCCL", "ok" if nccl else "missing", detail, is_broken=count > 1 and not nccl)
    if count > 1:
        pairs = itertools.combinations(range(count), 2)
        apart = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
        detail = f"not between GPUs {', '.join(apart[:6])}" if apart else f"between all {count} GPUs"
        yield Check("Distributed", "GPU to GPU", "slow" if apart else "ok", detail)

    import triton

    from liger_ops import silu_mul

    cache = Path(triton.knobs.cache.dir).expanduser().absolute()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free, is_writable = shutil.disk_usage(existing).free / _GIB, os.access(existing, os.W_OK)
    detail = f"{cache}, {free:.3g} GiB free{'' if is_writable else ', not writable'}"
    hint = "" if is_writable and free >= 1 else "set TRITON_CACHE_DIR to a folder on another disk"
    yield Check("Triton", "kernel cache", "wrong" if hint else "ok", detail, hint, is_broken=bool(hint))
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "none"
    hint = "" if shutil.which(compiler) else "launches need one: apt-get install gcc, or set CC to a compiler"
    yield Check("Triton", "C compiler", "missing" if hint else "ok", compiler, hint, is_broken=bool(hint and count))
    if triton.knobs.runtime.interpret:
        yield Check("Triton", "interpreter", "slow", "kernels run in NumPy", "unset TRITON_INTERPRET", count > 0)
    elif count:
        try:
            silu_mul(torch.ones(1, 16, device="cuda"), torch.ones(1, 16, device="cuda")).sum().item()
            yield Check("Triton", "compiler", "ok", "a kernel compiled and ran")
        except Exception as raised:  # a compiler that is missing or broken
            hint = "needs a C compiler, Python's headers (apt-get install python3-dev) and a recent driver"
            yield Check("Triton", "compiler", "wrong", _one_line(raised), hint, is_broken=True)

    if find_spec("deepspeed") is None:
        return
    from torch.utils.cpp_extension import CUDA_HOME, is_ninja_available

    cxx = shutil.which(os.environ.get("CXX", "c++"))
    tools = {"ninja": is_ninja_available(), "a C++ compiler": cxx, "nvcc": CUDA_HOME or not count}
    missing = ", ".join(tool for tool, found in tools.items() if not found)
    detail = f"its optimizers need {missing}" if missing else "its optimizers can be built"
    hint = "install g++, ninja and the CUDA toolkit (nvcc) of torch's CUDA version" if missing else ""
    yield Check("Distributed", "DeepSpeed", "missing" if missing else "ok", detail, hint)


# Ops


def check_ops(end: float) -> list[Check]:
    """Self-checks of all ops; on a GPU several processes share them, because kernels compile."""
    count = min(8, max(1, (os.cpu_count() or 1) // 2)) if Path("/dev/nvidiactl").exists() else 1
    with ThreadPoolExecutor(count) as threads:
        parts = list(threads.map(lambda part: list(_check_part(f"{part}/{count}", end)), range(count)))
    return [check for group in itertools.zip_longest(*parts) for check in group if check]  # as ops are dealt out


def _check_part(part: str, end: float) -> Iterator[Check]:
    """The rows of some ops; a process that ends early is followed by one for the ops after its last one."""
    names = ["--part", part]
    while names:
        rows, failure = run([sys.executable, "-m", "liger_ops.self_check", *names], end)
        if not rows:
            yield Check("Ops", "self-checks", "wrong", failure or "no result", "see the rows on packages", True)
            return
        names = rows[0]["ops"]
        for op, results in itertools.groupby(rows[1:], lambda result: str(result["op"])):
            yield _describe(op, list(results))
            names.remove(op)
        if time.monotonic() >= end:
            hint = "compiled kernels are cached: run it again"
            yield from (Check("Ops", op, "slow", "not finished in time", hint, is_broken=True) for op in names)
            return
        if names and (failure or len(rows) == 1):
            yield Check("Ops", names.pop(0), "wrong", failure or "no result", is_broken=True)


def _describe(op: str, results: Sequence[dict[str, Any]]) -> Check:
    worst = max(results, key=lambda result: (bool(result["message"]), result["error"] / (result["allowed"] or 1.0)))
    if worst["message"] and worst["is_unsupported"]:
        return Check("Ops", op, "missing", worst["message"])
    if worst["message"]:
        hint = "report it with the output of lightning-liger doctor --json"
        detail = f"{worst['message']} ({worst['device']}, {worst['dtype']})"
        return Check("Ops", op, "wrong", detail, hint, is_broken=True)
    path = {"triton": "Triton", "emulated": "emulated"}.get(worst["path"], "PyTorch")
    devices = len({each["device"] for each in results})
    where = f"{path}, {worst['dtype']}" + (f", {devices} GPUs" if devices > 1 else "")
    return Check("Ops", op, "ok", f"{where}: error {worst['error']:.1e} of {worst['allowed']:.1e}")


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


if __name__ == "__main__":  # prints a line of JSON for each row
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # packages that print when they are imported
    name, first = sys.argv[1], int(sys.argv[2])
    for check in packages(first) if name == "packages" else machine():
        print(json_module.dumps(asdict(check)), file=lines, flush=True)
    os._exit(0)  # some packages take long to shut down
