"""``lightning-liger doctor``: packages, the machine and ops that are broken become rows and the exit status."""

import json
import os
import subprocess
import sys
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from liger_ops.self_check import NAMES
from lightning_liger.commands import doctor, doctor_checks, doctor_processes
from lightning_liger.commands.doctor import run_doctor
from lightning_liger.commands.doctor_checks import Check, check_hardware, check_ops, check_packages
from lightning_liger.commands.doctor_processes import run

PYTHONPATH = os.pathsep.join(path for path in sys.path if path)
BROKEN = Check("Packages", "x", "wrong", "1.0; needs >=[2]", "pip install 'x>=2'", is_broken=True)
FINE = [Check("Packages", "torch", "ok", "2.13"), Check("Hardware", "GPU", "missing", "none")]


def by_name(checks: Any) -> dict[str, Check]:
    return {check.name: check for check in checks}


def soon() -> float:
    return time.monotonic() + 120


def requirements(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: list(lines))


# The command.


def test_whole_command_on_this_machine_with_a_broken_package_and_a_wrong_op(tmp_path: Path) -> None:
    """As the installed command runs it, where the package itself cannot be imported."""
    (tmp_path / "peft.py").write_text("raise OSError('libcuda.so.1: cannot open\\nshared object file')")
    (tmp_path / "torchmetrics.py").write_text("import os; os.abort()")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'liger_ops.self_check' in sys.orig_argv:\n"
        "    import liger_ops\n"
        "    right = liger_ops.silu_mul\n"
        "    liger_ops.silu_mul = lambda gate, up: 1.01 * right(gate, up)\n"
    )
    script = tmp_path / "lightning-liger"
    script.write_text("from lightning_liger.cli import main\nimport sys\nsys.exit(main())\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PYTHONPATH}"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(script), "doctor", "--json"], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["exit_status"] == 1
    checks = by_name(Check(**row) for row in report["checks"])
    assert {"python", "torch", "triton", "GPU", "compiler", "NCCL"} <= checks.keys()
    assert [name for name, check in checks.items() if check.group == "Ops"] == list(NAMES)
    broken = {name for name, check in checks.items() if check.is_broken}
    assert {"torchmetrics", "silu_mul", "lightning-liger"} <= broken
    assert broken <= {"torchmetrics", "silu_mul", "lightning-liger", "lightning", "transformers", "peft (optional)"}
    assert "SIGABRT" in checks["torchmetrics"].detail
    assert "output 0 is wrong: error" in checks["silu_mul"].detail
    assert checks["rms_norm"].status == "ok"
    if find_spec("deepspeed") is not None:
        assert {"DeepSpeed cpu_adam", "DeepSpeed fused_adam"} <= checks.keys()
    if "peft (optional)" in checks and checks["peft (optional)"].status != "missing":
        assert "OSError: libcuda.so.1: cannot open" in checks["peft (optional)"].detail


@pytest.mark.parametrize(("extra", "status"), [([], 0), ([BROKEN], 1)])
def test_exit_status_and_output(
    extra: list[Check], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [*extra, *FINE])
    for columns in ("80", "160"):
        monkeypatch.setenv("COLUMNS", columns)
        assert run_doctor() == status
        table = capsys.readouterr().out
        assert max(map(len, table.splitlines())) <= int(columns)
        assert ("1 broken: x" if status else "Everything that is needed works.") in table
        assert ("needs >=[2]" in table) == ("pip install 'x>=2'" in table) == bool(status)
    assert run_doctor(json=True) == status
    report = json.loads(capsys.readouterr().out)
    assert (report["exit_status"], len(report["checks"])) == (status, 2 + status)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert run_doctor() == status
    assert "torch: 2.13" in capsys.readouterr().out


# Packages.


def test_packages_that_are_missing_or_of_another_version_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements(
        monkeypatch,
        *("torch>=2.11", "numpy>=99", "not-there>=1.5", 'rich>=99; extra == "peft"', 'nor-there; extra == "parquet"'),
        *('lightning-liger[peft]; extra == "bench"', 'psutil; extra == "plots"', 'pyarrow; extra == "parquet"'),
        *('ruff>=99; extra == "dev"', "typing-extensions"),
    )
    problem = doctor_checks._ImportError("psutil", "", "OSError: no")
    monkeypatch.setattr(
        doctor_checks, "_import_errors", lambda modules, end: {**dict.fromkeys(modules), "psutil": problem}
    )
    checks = by_name(check_packages(soon()))
    assert (checks["torch"].status, checks["typing-extensions"].status, checks["python"].status) == ("ok", "ok", "ok")
    assert checks["not-there"] == Check(
        "Packages", "not-there", "missing", "not installed; needs >=1.5", "pip install 'not-there>=1.5'", is_broken=True
    )
    assert (checks["numpy"].status, checks["numpy"].is_broken) == ("wrong", True)
    assert checks["numpy"].detail.endswith("; needs >=99")
    assert checks["rich (optional)"].hint == "pip install 'lightning-liger[peft]'"
    rich, psutil = checks["rich (optional)"], checks["psutil (optional)"]
    assert (rich.status, psutil.status, rich.is_broken, psutil.is_broken) == ("wrong", "wrong", False, False)
    assert rich.detail.endswith("; needs >=99; extra peft")
    assert psutil.detail.endswith("; import fails: OSError: no; extra plots")
    assert checks["pyarrow (optional)"].detail.endswith("; extra parquet, for Parquet files as data")
    assert not any("lightning-liger (" in name for name in checks)
    assert (checks["nor-there (optional)"].status, checks["nor-there (optional)"].is_broken) == ("missing", False)
    assert not any("ruff" in name for name in checks)


def test_ranges_are_those_of_the_installed_distribution() -> None:
    names = {each.name: each for each in doctor_checks.needed_packages()}
    assert {"torch", "triton", "lightning", "transformers", "deepspeed", "peft"} <= names.keys()
    assert not names["torch"].extra
    assert names["peft"].extra == "peft"
    assert names["torch"].installed == metadata.version("torch")


def test_without_the_distribution_or_packaging_there_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", raises)
    (check,) = check_packages(soon())
    assert (check.name, check.status, check.is_broken) == ("lightning-liger", "missing", True)
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    (check,) = check_packages(soon())
    assert (check.name, check.hint) == ("packaging", "pip install packaging")


# The machine.


@pytest.mark.parametrize("driver", [("", ""), ("570.86", "NVIDIA H200")])
def test_a_gpu_that_torch_does_not_see_is_wrong_and_none_is_not(
    driver: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Check("Hardware", "GPU", "missing", "CPUs only")
    monkeypatch.setattr(doctor_checks, "check_probe", lambda name, end: iter([found]))
    monkeypatch.setattr(doctor_checks, "driver", lambda: driver)
    gpu = by_name(check_hardware(soon()))["GPU"]
    assert gpu.is_broken == bool(driver[0])
    text = "does not see the NVIDIA H200: it is built for CPUs only" if driver[0] else "A GPU would run Triton kernels"
    assert text in gpu.detail


def test_small_shared_memory_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "check_probe", lambda name, end: iter([]))
    monkeypatch.setattr(doctor_checks.shutil, "disk_usage", lambda path: type("Usage", (), {"total": 64 * 2**20}))
    check = by_name(check_hardware(soon()))["shared memory"]
    assert check.status == "slow"
    assert "--shm-size" in check.hint


# Processes.


def test_processes_that_fail_crash_or_hang_say_so() -> None:
    def of(code: str, seconds: float = 60.0) -> Any:
        return run([sys.executable, "-c", code], time.monotonic() + seconds)

    assert of("print('{\"a\": 1}'); print('noise')") == ([{"a": 1}], "")
    assert of("print('{\"a\": 1}', flush=True); raise KeyError('x')") == ([{"a": 1}], "KeyError: 'x'")
    assert of("import os; os.kill(os.getpid(), 11)") == ([], "the process died: SIGSEGV")
    assert of("import time; time.sleep(60)", 0.3) == ([], "no result in time")


def result(op: str, device: str = "cuda:0", message: str = "", is_error: bool = False) -> dict[str, Any]:
    measured = {"dtype": "bfloat16", "path": "triton", "error": 1e-3, "allowed": 4e-3, "seconds": 1.0}
    return {"op": op, "device": device, "message": message, "is_error": is_error, **measured}


def test_ops_after_one_that_kills_the_process_are_checked_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two GPUs; the second op fails, the third kills its process, the last is too late."""
    two = [result("a", "cuda:0"), result("a", "cuda:1")]
    answers = iter(
        [
            ([{"ops": list("abcd")}, *two, result("b", "cuda:1", "RuntimeError: x", True)], ""),
            ([{"ops": list("cd")}], "the process died: SIGSEGV"),
            ([{"ops": ["d"]}], "no result in time"),
        ]
    )
    asked: list[list[str]] = []
    end = soon()

    def answer(command: list[str], end: float) -> Any:
        asked.append(command[3:])
        if len(asked) == 3:
            monkeypatch.setattr(doctor_checks.time, "monotonic", lambda: end + 1)
        return next(answers)

    monkeypatch.setattr(doctor_checks, "run", answer)
    monkeypatch.setattr(doctor_checks, "_num_processes", lambda: 1)
    checks = check_ops(end)
    assert asked == [["--part", "0/1"], ["c", "d"], ["d"]]
    assert [(check.name, check.status, check.is_broken) for check in checks] == [
        ("a", "ok", False),
        ("b", "wrong", True),
        ("c", "wrong", True),
        ("d", "slow", True),
    ]
    assert checks[0].detail == "Triton, bfloat16, 2 GPUs: error 1.0e-03 of 4.0e-03"
    assert checks[1].detail == "RuntimeError: x (cuda:1, bfloat16)"
    assert "SIGSEGV" in checks[2].detail


def test_ops_are_a_row_if_torch_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no CUDA libraries')")
    monkeypatch.setattr(
        doctor_processes, "_environment", lambda: {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PYTHONPATH}"}
    )
    (check,) = check_ops(soon())
    assert (check.name, check.status, check.is_broken) == ("self-checks", "wrong", True)
    assert check.detail == "ImportError: no CUDA libraries"
