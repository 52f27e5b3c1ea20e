"""The host's time of layers is measured without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_kind_of_model_has_its_times_and_launches_are_counted_as_on_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "COLUMNS": "200"}
    command = [sys.executable, "-m", "benchmarks.host_time", "--profile", "cheap"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"│ (\S.*?\S) +│ (\d+) +│ (\d+) +│", done.stdout)
    assert [text for text, _, _ in rows] == [
        "transformers, eager",
        "with our kernels",
        "and bookkeeping of cheap tensors, the default",
        "all layers recomputed",
    ]
    assert all(int(time) > 0 for _, *times in rows for time in times)
    launches = int(re.search(r"^ +(\d+) .*_row_norm_forward\)$", done.stdout, re.MULTILINE)[1])
    assert launches == 20 * (33 + 32)  # profiled steps, and norms, of which those in layers run again in backward
