"""Every yaml in ``examples/`` has its command, its page and a monitor, and rows that fit the model."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").rglob("*.yaml"))}
EXAMPLES = [path for path in TEXTS if path.parent.name == "examples"]
ON_TEXT = [path for path in EXAMPLES if ".TextDataModule" in TEXTS[path] and "LigerCausalLM" in TEXTS[path]]
DOCS = ROOT / "docs" / "examples"
WITHOUT_PAGE = {"tiny": "pretrain", "llama3_8b": "pretrain", "quickstart": "sft", "qlora": "lora"}
"""Examples that are on the page of another one."""


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
