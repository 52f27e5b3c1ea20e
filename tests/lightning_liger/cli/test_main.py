"""Configurations compose and come back from ``--print_config``, and Ctrl-C ends the command in one line."""

import sys
from pathlib import Path

import pytest
import yaml

from lightning_liger.cli import main
from lightning_liger.cli.training import LigerCLI
from tests.lightning_liger.workers.example_runs import OF_THE_HUB

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path for path in (ROOT / "examples").glob("*.yaml") if path.name not in OF_THE_HUB)
STRATEGIES = sorted((ROOT / "examples" / "strategies").glob("*.yaml"))
SFT = ROOT / "examples" / "sft.yaml"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-liger"])


@pytest.fixture
def printed(capsys):
    """Calls the command with ``--print_config``, and returns what it prints."""

    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--print_config"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return call


def contains(config, part) -> bool:
    if isinstance(part, dict):
        return all(key in config and contains(config[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(config) == len(part) and all(map(contains, config, part))
    return config == part


CASES = [
    *(("fit", path) for path in RECIPES),
    *(("fit", ROOT / "examples" / "tiny.yaml", path) for path in STRATEGIES if "deepspeed" not in path.name),
    ("validate", SFT),
    ("test", SFT),
    ("predict", SFT),
    ("export", SFT, "--ckpt_path=a.ckpt", "--output=b"),
    ("teacher_topk", SFT, "--output=a.safetensors"),
]


def test_printed_config_is_the_same_when_it_is_read_again(printed):
    for subcommand, *given in CASES:
        arguments = [f"--config={each}" if isinstance(each, Path) else each for each in given]
        text = printed(subcommand, *arguments)
        Path("printed.yaml").write_text(text, encoding="utf-8")
        assert printed(subcommand, "--config=printed.yaml") == text, given
        last = [yaml.safe_load(each.read_text(encoding="utf-8")) for each in given if isinstance(each, Path)][-1]
        last.get("trainer", {}).pop("max_time", None)
        assert contains(yaml.safe_load(text), last), given


@pytest.mark.parametrize("by_lightning", [False, True], ids=["here", "in Lightning"])
def test_interrupt_ends_in_one_line(monkeypatch, capsys, by_lightning):
    def interrupted(*args, **kwargs):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if not by_lightning:
                raise
            sys.exit(1)  # as Lightning's Trainer does

    monkeypatch.setattr(LigerCLI, "__init__", interrupted)
    assert main(["fit"]) == 130
    assert capsys.readouterr().err == "lightning-liger: interrupted\n"


def test_modules_in_this_folder_can_be_named(printed, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("my_model_of_this_test.py").write_text(
        "from lightning_liger import LigerCausalLM\n\nclass MyModel(LigerCausalLM): ...\n", encoding="utf-8"
    )
    text = printed("fit", f"--config={SFT}", "--model=my_model_of_this_test.MyModel")
    assert "class_path: my_model_of_this_test.MyModel" in text
