"""Commands that need no PyTorch, where it cannot be imported; output whose reader ends."""

import os
import subprocess
import sys

import pytest

from lightning_liger.cli import main

PYTHONPATH = os.pathsep.join(path for path in sys.path if path)


def start(folder, *arguments, program=("-m", "lightning_liger")):
    """The status, output and errors of a program that cannot import PyTorch."""
    (folder / "torch.py").write_text("raise ImportError('PyTorch is imported')")
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{PYTHONPATH}"}
    command = [sys.executable, *program, *arguments]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return process.returncode, process.stdout, process.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--help"], 0, "usage: lightning-liger SUBCOMMAND"),
        (["--version"], 0, "lightning-liger 0."),
        (["init"], 0, "Recipes:"),
        ([], 2, "subcommand is required"),
        (["init", "SFT"], 2, "got 'SFT' (did you mean 'sft'?)"),
        (["init", "sft", "--output="], 2, "output must be the name of a file, got ''"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands_that_need_no_pytorch_do_not_import_it(arguments, status, words, tmp_path):
    found, output, errors = start(tmp_path, *arguments)
    assert found == status, errors
    assert words in (errors if status else output)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["torch.py"]


def test_the_script_runs_early_and_processes_that_it_starts_do_not(tmp_path):
    script = tmp_path / "lightning-liger"
    script.write_text("import sys\nfrom lightning_liger.cli import main\nsys.exit(main())\n")
    status, output, errors = start(tmp_path, "--version", program=(str(script),))
    assert (status, errors) == (0, "")
    assert output.startswith("lightning-liger 0.")
    for given in ([], ["doctor"], ["--version"]):
        code = f"import sys; sys.argv = {[str(script), *given]}; import lightning_liger"  # as multiprocessing does
        status, output, errors = start(tmp_path, program=("-c", code))
        assert (status, output) == (1, "")
        assert "PyTorch is imported" in errors


def test_a_reader_that_ends_and_a_closed_output_are_no_bugs(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    command, environment = [sys.executable, "-m", "lightning_liger", "init"], {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--version"]) == 0
