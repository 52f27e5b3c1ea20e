"""The site: its pages, and what the pages on migration and troubleshooting print."""

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from transformers import AutoTokenizer

from liger_ops import linear_cross_entropy
from tests.lightning_liger.tiny import VOCAB_SIZE, tiny_batch, tiny_llama

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAIRS, ANSWERS = (ROOT / "examples" / "data" / name for name in ("preference.jsonl", "completions.jsonl"))
MIGRATION = {
    (path.stem, number): source
    for path in sorted((DOCS / "migration").glob("*.md"))
    for number, source in enumerate(
        re.findall(r'```python title="after"\n(.*?)```', path.read_text(encoding="utf-8"), flags=re.DOTALL)
    )
}


def test_every_page_is_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = re.findall(r"[\w/]+(?:\.md|/)(?=['\]}])", str(site["nav"]))
    assert {"index.md", "examples/", "api/", "contributing/index.md"} <= set(named)
    if (index := DOCS / "examples" / "index.md").exists():
        linked = re.findall(r"\]\((\w+\.md)\)", index.read_text(encoding="utf-8"))
        named += ["examples/index.md", *(f"examples/{page}" for page in linked)]
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert sorted(pages - set(named)) == []


def test_results_that_the_page_on_measurements_names_exist() -> None:
    page = (DOCS / "measured.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+(?:\.jsonl|/))`", page)
    assert len(named) > 8
    assert [name for name in named if not (ROOT / "benchmarks" / "results" / name).exists()] == []


def _tiny_model(folder: Path, vocab_size: int = VOCAB_SIZE) -> str:
    tiny_llama(vocab_size=vocab_size, num_hidden_layers=1, max_position_embeddings=256).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "examples" / "data" / "tokenizer").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("page", "number"), MIGRATION, ids=lambda value: str(value))
def test_code_after_a_migration_runs(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = MIGRATION[page, number].replace('precision="bf16-mixed"', 'precision="32-true"')
    folder = _tiny_model(tmp_path / "model", VOCAB_SIZE if page == "lightning" else 320)
    for printed, value in (("path/to/model", folder), ("pairs.jsonl", str(PAIRS)), ("answers.jsonl", str(ANSWERS))):
        source = source.replace(f'"{printed}"', repr(value))
    limits = 'accelerator="cpu", limit_train_batches=1, limit_val_batches=0, logger=False, enable_checkpointing=False'
    source = source.replace("devices=1", f"devices=1, enable_progress_bar=False, enable_model_summary=False, {limits}")
    source = source.replace("max_steps=100", "max_steps=1")
    scope: dict[str, Any] = {"train_loader": torch.utils.data.DataLoader([tiny_batch()], batch_size=None)}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*materializes the logits")
        exec(source, scope)
    if "trainer" in scope:
        assert isinstance(scope["trainer"], L.Trainer)
        assert scope["trainer"].global_step == 1
        report = scope["trainer"].strategy.patch_report
        assert any(entry.kernel == "linear_cross_entropy" for entry in report.entries)
    elif "loss" in scope:
        names = ("hidden_states", "lm_head_weight", "labels")
        assert scope["loss"] > linear_cross_entropy(*(scope[name] for name in names), softcap=30.0)  # has the z-loss
    else:
        assert (scope.get("report") or scope["model"].liger_report).num_replaced > 0


def test_migration_pages_have_code_after() -> None:
    assert {page for page, _ in MIGRATION} == {"liger_kernel", "trl", "lightning"}


def _messages() -> Iterator[str]:
    """The strings of both packages, with a null character for each value that is formatted into them."""
    for folder in (ROOT / "lightning_liger", ROOT / "kernels"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                elif isinstance(node, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)


def test_messages_on_the_page_of_troubleshooting_are_those_of_the_package() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    printed = re.findall(r"^ *```output\n(.*?)^ *```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(printed) > 20
    messages = [message.replace("\0", "...") for message in _messages() if len(message) > 15]
    unknown = []
    for message in printed:
        parts = [re.escape(part.strip()) for part in message.strip().split("...") if part.strip(" .,:;()")]
        if not any(re.search(".*".join(parts), known, flags=re.DOTALL) for known in messages):
            unknown.append(message)
    assert unknown == []
