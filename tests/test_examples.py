"""Every yaml in ``examples/`` is accepted by the command line."""

from pathlib import Path

import pytest
import yaml

from lightning_liger import LigerCausalLM, LigerStrategy
from lightning_liger.cli import LigerCLI

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))
ON_TEXT = [
    example
    for example in EXAMPLES
    if ".TextDataModule" in (text := example.read_text(encoding="utf-8")) and "LigerCausalLM" in text
]
SHARDED = [
    example for example in ON_TEXT if "class_path: lightning_liger.LigerDDP" not in example.read_text(encoding="utf-8")
]
DOCS = EXAMPLES[0].parents[1] / "docs" / "examples"
WITHOUT_PAGE = {"tiny": "pretrain", "llama3_8b": "pretrain"}
"""Examples that are on the page of another one."""


def test_there_are_examples():
    assert {"tiny.yaml", "llama3_8b.yaml", "pretrain.yaml", "multi_node.yaml"} == {path.name for path in SHARDED}


@pytest.mark.parametrize("example", SHARDED, ids=lambda example: example.stem)
def test_example_parses_and_instantiates(example, monkeypatch):
    monkeypatch.chdir(example.parents[1])
    monkeypatch.setattr("sys.argv", ["lightning-liger"])
    # Overrides for a machine without a GPU. The model itself is built when training starts.
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=1"]
    cli = LigerCLI(args=[f"--config={example}", *options], run=False)
    assert isinstance(cli.model, LigerCausalLM)
    assert isinstance(cli.trainer.strategy, LigerStrategy)
    written = yaml.safe_load(example.read_text(encoding="utf-8"))
    assert cli.trainer.max_steps == written["trainer"].get("max_steps", -1)
    assert cli.datamodule.block_size == written["data"]["init_args"]["block_size"]
    for name, value in written["model"]["init_args"]["config"].items():
        found = getattr(cli.model.config, name)
        assert found.items() >= value.items() if isinstance(value, dict) else found == value


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_names_itself_in_the_command_at_its_top(example):
    head = [line for line in example.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any(f"lightning-liger fit --config examples/{example.name}" in line for line in head)


@pytest.mark.parametrize("example", ON_TEXT, ids=lambda example: example.stem)
def test_rows_of_an_example_fit_its_model(example):
    written = yaml.safe_load(example.read_text(encoding="utf-8"))
    config, data = written["model"]["init_args"]["config"], written["data"]["init_args"]
    assert data["block_size"] <= config["max_position_embeddings"]
    assert data.get("vocab_size", 16384) <= config["vocab_size"]


@pytest.mark.parametrize("example", sorted(EXAMPLES[0].parent.rglob("*.yaml")), ids=lambda example: example.stem)
def test_first_line_says_the_story_in_one_sentence(example):
    first, second = example.read_text(encoding="utf-8").splitlines()[:2]
    assert first.startswith("# ")
    assert first.endswith((".", "?"))
    assert ". " not in first
    assert second == "#"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_has_a_page_which_the_index_lists(example):
    stem = WITHOUT_PAGE.get(example.stem, example.stem)
    page = (DOCS / f"{stem}.md").read_text(encoding="utf-8")
    assert f"examples/{example.name}" in page
    assert f"({stem}.md)" in (DOCS / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_is_monitored(example):
    callbacks = yaml.safe_load(example.read_text(encoding="utf-8"))["trainer"]["callbacks"]
    assert "lightning_liger.LigerMonitor" in [callback["class_path"] for callback in callbacks]
