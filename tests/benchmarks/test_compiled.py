"""Kernels compile for GPUs that are not here, and fit into their shared memory."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")


@pytest.mark.timeout(1200)
def test_kernels_compile_for_each_architecture_and_fit() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, "-m", "benchmarks.compiled", "--quick"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1190)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each for each in results if each["wrong"]] == []
    assert done.returncode == 0, done.stderr
    compiled = {name: {each["kernel"] for each in results if each["architecture"] == name} for name in ARCHITECTURES}
    assert all(compiled.values())
    kernels = set().union(*compiled.values())
    assert compiled["sm_86"] == {name for name in kernels if not name.startswith("fp8.")}
    page = (ROOT / "docs" / "contributing" / "architectures.md").read_text(encoding="utf-8")
    header, *rows = [line.split(" | ") for line in re.findall(r"^\| (kernel .*|`\S*` .*) \|$", page, re.MULTILINE)]
    cells = {(row[0].strip("`"), name): cell for row in rows for name, cell in zip(header[1:], row[1:], strict=True)}
    assert {name for name, _ in cells} == kernels
    for each in results:
        cell = cells[each["kernel"], each["architecture"]]
        if triton.__version__ in page:  # another compiler may take more or less
            assert cell == f"{each['shared'] / 1024:.1f}", each
        assert cell != "-", each
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "kernels").rglob("*.py")]
    assert len(kernels) == sum(source.count("\n@backend.Kernel\n") for source in sources)
