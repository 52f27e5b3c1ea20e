"""Parts of ``lightning-liger doctor`` that import packages which may be broken: each runs in a separate process.

A probe yields rows of the table as dictionaries of the fields of ``doctor.Check``. Packages are imported in the probes,
not here.
"""

import importlib
import itertools
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

Rows = Iterator[dict[str, Any]]

_GIB = 2**30


def probe_imports(*modules: str) -> Rows:
    """The error of each module's import and the package that raised it; the process may die in one of them."""
    for module in modules:
        # The doctor runs without this package's __init__.
        for name in [name for name in sys.modules if name.partition(".")[0] == module == "lightning_liger"]:
            del sys.modules[name]
        error = culprit = ""
        try:
            importlib.import_module(module)
        except Exception as raised:  # whatever a broken package raises
            frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(raised.__traceback__)]
            packages = [name.partition(".")[0] for name in frames if name]
            culprit = next((name for name in reversed(packages) if name != "importlib"), "")
            error = _one_line(raised)
        yield {"name": module, "detail": error, "culprit": culprit}


def probe_gpus() -> Rows:
    """GPUs as torch sees them, with bfloat16; NCCL, and copies from GPU to GPU."""
    import torch
    import torch.distributed as dist

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    if not torch.cuda.is_available():
        yield _row("Hardware", "GPU", "missing", built_for)
        has_gloo = dist.is_available() and dist.is_gloo_available()
        yield _row("Distributed", "NCCL", "missing", f"needs GPUs; on CPUs: {'gloo' if has_gloo else 'nothing'}")
        return
    count = torch.cuda.device_count()
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        free, _ = torch.cuda.mem_get_info(index)
        key = (found.name, found.major, found.minor, found.total_memory, round(free / _GIB))
        alike.setdefault(key, []).append(index)
    for (name, major, minor, memory, free), indices in alike.items():
        detail = f"{name}, compute capability {major}.{minor}, {memory / _GIB:.1f} GiB, {free} GiB free"
        title = f"GPU {_ranges(indices)}"
        if major >= 8:
            yield _row("Hardware", title, "ok", f"{detail}, bfloat16")
        else:
            yield _row("Hardware", title, "slow", f"{detail}, no bfloat16", "use precision 16-mixed or 32-true")
    yield _row("Hardware", "torch built for", "ok", built_for)
    if not (dist.is_available() and dist.is_nccl_available()):
        yield _row("Distributed", "NCCL", "missing", "this build of torch has none", is_broken=count > 1)
        return
    yield _row("Distributed", "NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    if count > 1:
        pairs = itertools.combinations(range(count), 2)
        apart = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
        detail = f"not between GPUs {', '.join(apart[:6])}" if apart else f"between all {count} GPUs"
        yield _row("Distributed", "GPU to GPU", "slow" if apart else "ok", detail)


def probe_triton() -> Rows:
    """Whether Triton compiles a kernel, and runs it if there is a GPU."""
    import torch
    import triton

    has_gpu = torch.cuda.is_available()
    cache = existing = os.path.abspath(os.path.expanduser(triton.knobs.cache.dir))
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    free = shutil.disk_usage(existing).free / _GIB
    is_usable = os.access(existing, os.W_OK) and free >= 1
    detail = f"{cache}, {free:.3g} GiB free{'' if os.access(existing, os.W_OK) else ', not writable'}"
    hint = "" if is_usable else "set TRITON_CACHE_DIR to a folder on another disk"
    yield _row("Triton", "kernel cache", "ok" if is_usable else "wrong", detail, hint, is_broken=not is_usable)

    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "none"
    if shutil.which(compiler):
        yield _row("Triton", "C compiler", "ok", compiler)
    else:
        hint = "apt-get install gcc, or set CC to a compiler"
        yield _row("Triton", "C compiler", "missing", f"{compiler}; launches need one", hint, is_broken=has_gpu)
    if triton.knobs.runtime.interpret:
        detail = "TRITON_INTERPRET is set: kernels run in NumPy"
        yield _row("Triton", "interpreter", "slow", detail, "unset TRITON_INTERPRET", is_broken=has_gpu)
        return

    from lightning_liger.commands.doctor_kernel import compile_kernel, run_kernel

    start = time.perf_counter()
    try:
        if has_gpu:
            run_kernel()
        else:
            compile_kernel(90)
    except Exception as raised:  # a compiler that is missing or broken
        hint = "needs a C compiler, Python's headers (apt-get install python3-dev) and a recent driver"
        yield _row("Triton", "compiler", "wrong", _one_line(raised), hint, is_broken=has_gpu)
        return
    done = "a kernel compiled and ran" if has_gpu else "a kernel compiled for compute capability 9.0"
    yield _row("Triton", "compiler", "ok", f"{done}, {time.perf_counter() - start:.1f} s")


def probe_deepspeed() -> Rows:
    """Whether DeepSpeed can build the optimizers of its strategies, which it does at their first use."""
    import torch
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.builder import assert_no_cuda_mismatch
    from torch.utils.cpp_extension import is_ninja_available

    for name, use in {"cpu_adam": "offload_optimizer", "fused_adam": "FusedAdam"}.items():
        problem = ""
        if not installed_ops.get(name):
            if not is_ninja_available():
                problem = "ninja is missing"
            elif shutil.which(os.environ.get("CXX", "c++")) is None:
                problem = "a C++ compiler is missing"
            elif torch.cuda.is_available():
                try:
                    assert_no_cuda_mismatch(name)
                except Exception as raised:  # of DeepSpeed: no CUDA toolkit, or one of another version
                    problem = _one_line(raised)
        if problem:
            hint = "install g++, ninja and the CUDA toolkit (nvcc) of torch's CUDA version"
            yield _row("Distributed", f"DeepSpeed {name}", "missing", f"{problem}; for {use}", hint)
        else:
            yield _row("Distributed", f"DeepSpeed {name}", "ok", f"can be built; for {use}")


PROBES = {"imports": probe_imports, "gpus": probe_gpus, "triton": probe_triton, "deepspeed": probe_deepspeed}


def main() -> None:
    """Runs the probe ``sys.argv[1]`` with the arguments after it, and prints a line of JSON for each row."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # packages that print when they are imported
    for row in PROBES[sys.argv[1]](*sys.argv[2:]):
        results.write(json.dumps(row) + "\n")
        results.flush()
    sys.stderr.flush()
    os._exit(0)  # some packages take long to shut down


def _row(group: str, name: str, status: str, detail: str, hint: str = "", *, is_broken: bool = False) -> dict[str, Any]:
    return {
        "group": group,
        "name": name,
        "status": status,
        "detail": detail,
        "hint": hint,
        "is_broken": is_broken,
    }


def _ranges(indices: list[int]) -> str:
    is_run = indices == list(range(indices[0], indices[-1] + 1)) and len(indices) > 1
    return f"{indices[0]}-{indices[-1]}" if is_run else ", ".join(map(str, indices))


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
