"""``lightning-liger doctor``: packages, the machine and ops that are broken become rows and the exit status."""

import json
import os
import subprocess
import sys
import time
from importlib import metadata
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from liger_ops.self_check import NAMES
from lightning_liger.commands import doctor
from lightning_liger.commands.doctor import Check, check_ops, machine, packages, run, run_doctor

PYTHONPATH = os.pathsep.join(path for path in sys.path if path)
BROKEN = Check("Packages", "x", "wrong", "1.0; needs >=[2]", "pip install 'x>=2'", is_broken=True)
FINE = [Check("Packages", "torch", "ok", "2.13"), Check("Hardware", "GPU", "missing", "none")]


def by_name(checks):
    return {check.name: check for check in checks}


def soon():
    return time.monotonic() + 120


def test_whole_command_on_this_machine_with_broken_packages_and_a_wrong_op(tmp_path):
    """As the installed command runs it, where the package itself cannot be imported."""
    (tmp_path / "peft.py").write_text("raise OSError('libcuda.so.1: cannot open\\nshared object file')")
    (tmp_path / "torchmetrics.py").write_text("import os; os.abort()")
    wrong = "import liger_ops; right = liger_ops.silu_mul; liger_ops.silu_mul = lambda *given: 1.01 * right(*given)"
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nif 'liger_ops.self_check' in sys.orig_argv:\n    {wrong}\n"
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
    checks = by_name(Check(**row) for row in report["checks"])
    assert (report["exit_status"], checks.keys() >= {"torch", "triton", "GPU", "NCCL", "kernel cache"}) == (1, True)
    assert [name for name, check in checks.items() if check.group == "Ops"] == list(NAMES)
    broken = {name for name, check in checks.items() if check.is_broken}
    assert {"torchmetrics", "silu_mul", "lightning-liger"} <= broken
    assert broken <= {"torchmetrics", "silu_mul", "lightning-liger", "lightning", "transformers", "peft (optional)"}
    assert checks["torchmetrics"].detail.endswith("; import fails: the process died: SIGABRT")
    assert "output 0 is wrong: error" in checks["silu_mul"].detail
    assert checks["rms_norm"].status == "ok"
    if "peft (optional)" in checks and checks["peft (optional)"].status != "missing":
        assert "import fails: OSError: libcuda.so.1: cannot open" in checks["peft (optional)"].detail


@pytest.mark.parametrize(("extra", "status"), [([], 0), ([BROKEN], 1)])
def test_exit_status_and_output(extra, status, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda end: [*extra, *FINE])
    assert run_doctor() == status
    table = capsys.readouterr().out
    assert ("1 broken: x" if status else "Everything required works.") in table
    assert ("needs >=[2]" in table) == ("-> pip install 'x>=2'" in table) == bool(status)
    assert run_doctor(json=True) == status
    report = json.loads(capsys.readouterr().out)
    assert (report["exit_status"], len(report["checks"])) == (status, 2 + status)


def test_packages_that_are_missing_broken_or_of_another_version_are_named(tmp_path, monkeypatch):
    lines = (
        *("torch>=2.11", "numpy>=99", "not-there>=1.5", 'rich>=99; extra == "peft"', 'nor-there; extra == "parquet"'),
        *('lightning-liger[peft]; extra == "bench"', 'psutil; extra == "plots"', 'ruff>=99; extra == "dev"', "PyYAML"),
    )
    monkeypatch.setattr(metadata, "requires", lambda name: list(lines))
    (tmp_path / "psutil.py").write_text("import broken_by_this_test")
    (tmp_path / "broken_by_this_test.py").write_text("raise OSError('no')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "psutil", raising=False)
    checks = by_name(packages(0))
    assert {name: (check.status, check.is_broken) for name, check in checks.items() if check.status != "ok"} == {
        "numpy": ("wrong", True),
        "not-there": ("missing", True),
        "rich (optional)": ("wrong", False),
        "psutil (optional)": ("wrong", False),
        "nor-there (optional)": ("missing", False),
    }
    for name, detail, hint in (
        ("numpy", "; needs >=99", "pip install 'numpy>=99'"),
        ("not-there", "not installed; needs >=1.5", "pip install 'not-there>=1.5'"),
        ("rich (optional)", "; needs >=99; extra peft", "pip install 'lightning-liger[peft]'"),
        ("psutil (optional)", "; extra plots; import fails: OSError: no", "broken_by_this_test is at fault"),
    ):
        assert (checks[name].detail.endswith(detail), checks[name].hint) == (True, hint), name
    assert list(by_name(packages(2))) == list(checks)[2:]  # as after a process that died in the second one


def test_without_the_distribution_packaging_or_torch_there_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(metadata, "requires", Mock(side_effect=metadata.PackageNotFoundError))
    (tmp_path / "torch.py").write_text("raise ImportError('no CUDA libraries')")
    monkeypatch.syspath_prepend(tmp_path)
    found = [*packages(0), *check_ops(soon())]
    monkeypatch.setattr(doctor, "run", lambda command, end: ([], "ModuleNotFoundError: No module named 'packaging'"))
    found += doctor.probe("packages", soon())
    assert [(check.group, check.name, check.status, check.is_broken) for check in found] == [
        ("Packages", "lightning-liger", "missing", True),
        ("Ops", "self-checks", "wrong", True),
        ("Packages", "process", "wrong", True),
    ]
    assert found[1].detail == "ImportError: no CUDA libraries"
    assert "packaging" in found[2].detail


@pytest.mark.parametrize("driver", ["", "570.86, NVIDIA H200\n"])
def test_a_gpu_that_torch_does_not_see_is_wrong_and_none_is_not(driver, monkeypatch):
    answer = [SimpleNamespace(stdout=driver)] if driver else FileNotFoundError
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=answer))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(total=64 * 2**20, free=2**40))
    checks = by_name(machine())
    assert (checks["GPU"].is_broken, "driver" in checks) == (bool(driver), bool(driver))
    text = "does not see the NVIDIA H200: it is built for " if driver else "A GPU would run Triton kernels"
    assert text in checks["GPU"].detail
    assert (checks["shared memory"].status, "--shm-size" in checks["shared memory"].hint) == ("slow", True)


def test_processes_that_fail_crash_or_hang_say_so():
    def of(code, seconds=60.0):
        return run([sys.executable, "-c", code], time.monotonic() + seconds)

    assert of("print('{\"a\": 1}'); print('noise')") == ([{"a": 1}], "")
    assert of("print('{\"a\": 1}', flush=True); raise KeyError('x')") == ([{"a": 1}], "KeyError: 'x'")
    assert of("import os; os.kill(os.getpid(), 11)") == ([], "the process died: SIGSEGV")
    assert of("import time; time.sleep(60)", 0.3) == ([], "no result in time")


def result(op, device="cuda:0", message="", is_error=False):
    measured = {"dtype": "bfloat16", "path": "triton", "error": 1e-3, "allowed": 4e-3, "seconds": 1.0}
    return {"op": op, "device": device, "message": message, "is_error": is_error, "is_unsupported": False, **measured}


def test_an_op_that_the_gpu_cannot_run_is_missing_and_not_broken():
    check = doctor._describe("float8_fprop", [result("float8_fprop", message="too old") | {"is_unsupported": True}])
    assert check == Check("Ops", "float8_fprop", "missing", "too old")


def test_ops_after_one_that_kills_the_process_are_checked_in_another(monkeypatch):
    """On two GPUs; the second op fails, the third kills its process, the last is too late."""
    two = [result("a", "cuda:0"), result("a", "cuda:1"), result("b", "cuda:1", "RuntimeError: x", True)]
    answers = [([{"ops": list("abcd")}, *two], ""), ([{"ops": list("cd")}], "the process died: SIGSEGV")]
    answers.append(([{"ops": ["d"]}], "no result in time"))
    answer, end = Mock(side_effect=answers), soon()
    monkeypatch.setattr(doctor, "run", answer)
    monkeypatch.setattr(doctor.time, "monotonic", lambda: end + (1 if answer.call_count == 3 else -1))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    checks = check_ops(end)
    assert [call.args[0][3:] for call in answer.call_args_list] == [["--part", "0/1"], ["c", "d"], ["d"]]
    found = [(check.name, check.status, check.is_broken) for check in checks]
    assert found == [("a", "ok", False), ("b", "wrong", True), ("c", "wrong", True), ("d", "slow", True)]
    assert checks[0].detail == "Triton, bfloat16, 2 GPUs: error 1.0e-03 of 4.0e-03"
    assert checks[1].detail == "RuntimeError: x (cuda:1, bfloat16)"
    assert "SIGSEGV" in checks[2].detail
