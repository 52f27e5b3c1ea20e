"""Installs a wheel into an empty environment, and uses it as a new user would: python .ci/smoke.py WHEEL.

The environment finds the dependencies where the running Python has them, so that nothing is downloaded.
"""

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

PROGRAM = """
import sys
from importlib.metadata import version
from pathlib import Path
import lightning_liger, liger_ops
from lightning.pytorch.strategies import StrategyRegistry

for module in (lightning_liger, liger_ops):
    assert Path(module.__file__).is_relative_to(sys.prefix), module.__file__
    assert Path(module.__file__).with_name("py.typed").exists()
assert version("lightning-liger") == lightning_liger.__version__
names = {"liger", "liger_ddp", "liger_fsdp", "liger_model_parallel", "liger_deepspeed_stage_2"}
assert names <= set(StrategyRegistry), StrategyRegistry
"""


def main(wheel: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "environment"
        venv.create(made, with_pip=False)
        python = made / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--no-index", str(Path(wheel).resolve())], check=True)
        (packages,) = made.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

        command = str(made / "bin" / "lightning-liger")
        fit = ["fit", "--config", "sft.yaml", "--trainer.max_steps", "2", "--trainer.accelerator", "cpu"]
        for step in ([str(python), "-c", PROGRAM], [command, "--help"], [command, "init", "sft"], [command, *fit]):
            done = subprocess.run(step, cwd=folder, capture_output=True, text=True, timeout=300)
            if done.returncode:
                sys.exit(f"{Path(wheel).name}: {step[:3]} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        print(f"{Path(wheel).name}: imports, --help, init and two steps of training work in an empty environment")


if __name__ == "__main__":
    main(*sys.argv[1:])
