"""Every yaml in ``examples/`` is accepted by the command line, and has its command, its page and a monitor."""

from pathlib import Path

import pytest
import yaml

from lightning_liger import LigerCausalLM, LigerStrategy
from lightning_liger.cli import LigerCLI

ROOT = Path(__file__).parents[1]
TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").rglob("*.yaml"))}
EXAMPLES = [path for path in TEXTS if path.parent.name == "examples"]
ON_TEXT = [path for path in EXAMPLES if ".TextDataModule" in TEXTS[path] and "LigerCausalLM" in TEXTS[path]]
SHARDED = [path for path in ON_TEXT if "class_path: lightning_liger.LigerDDP" not in TEXTS[path]]
DOCS = ROOT / "docs" / "examples"
WITHOUT_PAGE = {"tiny": "pretrain", "llama3_8b": "pretrain"}
"""Examples that are on the page of another one."""


def test_there_are_examples():
    assert {"tiny.yaml", "llama3_8b.yaml", "pretrain.yaml", "multi_node.yaml"} == {path.name for path in SHARDED}


@pytest.mark.parametrize("example", SHARDED, ids=lambda example: example.stem)
def test_example_parses_and_instantiates(example, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["lightning-liger"])
    # Overrides for a machine without a GPU. The model itself is built when training starts.
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=1"]
    cli = LigerCLI(args=[f"--config={example}", *options], run=False)
    assert isinstance(cli.model, LigerCausalLM)
    assert isinstance(cli.trainer.strategy, LigerStrategy)
    written = yaml.safe_load(TEXTS[example])
    assert cli.trainer.max_steps == written["trainer"].get("max_steps", -1)
    assert cli.datamodule.block_size == written["data"]["init_args"]["block_size"]
    for name, value in written["model"]["init_args"]["config"].items():
        found = getattr(cli.model.config, name)
        assert found.items() >= value.items() if isinstance(value, dict) else found == value


@pytest.mark.parametrize("example", TEXTS, ids=lambda example: example.stem)
def test_example_tells_its_story(example):
    """In one sentence at its top, with its command, on a page that the index lists; and it is monitored."""
    first, second, *lines = TEXTS[example].splitlines()
    assert first.startswith("# ")
    assert first.endswith((".", "?"))
    assert ". " not in first
    assert second == "#"
    if example not in EXAMPLES:
        return
    command = f"lightning-liger fit --config examples/{example.name}"
    assert any(line.startswith("#") and command in line for line in lines)
    written = yaml.safe_load(TEXTS[example])
    assert "lightning_liger.LigerMonitor" in [each["class_path"] for each in written["trainer"]["callbacks"]]
    stem = WITHOUT_PAGE.get(example.stem, example.stem)
    assert f"examples/{example.name}" in (DOCS / f"{stem}.md").read_text(encoding="utf-8")
    assert f"({stem}.md)" in (DOCS / "index.md").read_text(encoding="utf-8")
    if example in ON_TEXT:  # rows fit the model
        config, data = written["model"]["init_args"]["config"], written["data"]["init_args"]
        assert data["block_size"] <= config["max_position_embeddings"]
        assert data.get("vocab_size", 16384) <= config["vocab_size"]
