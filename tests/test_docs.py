"""The pages in docs/ say what the code does, and name what exists."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import transformers
import yaml
from lightning.pytorch.strategies import StrategyRegistry

import lightning_liger
from benchmarks import docs_sections
from liger_ops.divergence.options import KINDS
from lightning_liger.losses import cpo, dpo, kto, policy_options, tpo
from lightning_liger.losses.distillation_options import MODES
from lightning_liger.strategies.registration import REGISTRATIONS
from tests.lightning_liger.architectures import CAUSAL_LM_TYPES, UNBUILDABLE
from tests.lightning_liger.models_table import HEADER, RELEASES, row, summary

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path: path.read_text(encoding="utf-8") for path in (*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")))}
MODELS = PAGES[DOCS / "models.md"]
ROWS = {line.split(" | ")[0].removeprefix("| "): line for line in MODELS.splitlines() if line.startswith("| ")}
VERSION = re.search(r"in transformers ([\d.]+)", MODELS)


def test_page_has_the_header_and_every_architecture() -> None:
    """What its rows say, ``patching/test_architectures.py`` compares."""
    assert MODELS.startswith(HEADER.format(version=VERSION.group(1)))
    assert MODELS.endswith(summary())
    assert len(ROWS) > 180
    if VERSION.group(1) == transformers.__version__:
        assert list(ROWS) == ["architecture", *CAUSAL_LM_TYPES]
        assert [name for name in UNBUILDABLE if row(name, None) != ROWS[name] + "\n"] == []


def test_newest_transformers_that_is_allowed_is_the_newest_that_passed() -> None:
    allowed = re.search(r'"transformers>=[\d.]+,<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    newest = next(iter(RELEASES)).split(".")
    assert (int(newest[0]), int(newest[1]) + 1) == (int(allowed.group(1)), int(allowed.group(2)))
    assert VERSION.group(1) in RELEASES


def test_tests_that_the_page_on_strategies_names_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGES[DOCS / "contributing" / "strategy_tests.md"])
    assert len(named) > 20
    for path, name in set(named):
        folder = "" if path.startswith("tests/") else "tests/lightning_liger/strategies"
        assert f"def {name}(" in (ROOT / folder / path).read_text(encoding="utf-8"), (path, name)


@pytest.mark.parametrize(("page", "section"), docs_sections.SECTIONS.values(), ids=list(docs_sections.SECTIONS))
def test_section_is_what_make_docs_writes(page: str, section: Callable[[], str]) -> None:
    text = PAGES[ROOT / page]
    start, stop = docs_sections.bounds(text, section.__name__)
    assert text[start:stop].strip("\n") == section().strip("\n")


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", PAGES[page], flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_headings_that_a_page_names_exist(page: Path) -> None:
    for target, _, anchor in (
        link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]) if "://" not in link
    ):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), (target, anchor)
    folders = ("lightning_liger", "kernels", "tests", "benchmarks", "docs", "examples")
    for path in re.findall(rf"`((?:{'|'.join(folders)})/[\w./]*)", PAGES[page]):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("name", "pattern", "roots"),
    [
        ("how_it_works.md", r"(?<![\w/.<])(?:\w+/)+(?:\w+\.py)?", ("", "lightning_liger", "kernels", "docs")),
        ("benchmarks.md", r"`(\w+(?:\.jsonl|/))`", ("benchmarks/results", "kernels/liger_ops")),
        ("../README.md", r"(?:examples|benchmarks/results|docs)/[\w./]+\.(?:yaml|png|md)", ("",)),
    ],
)
def test_files_that_a_page_names_without_their_folder_exist(name: str, pattern: str, roots: tuple[str, ...]) -> None:
    named = set(re.findall(pattern, PAGES[(DOCS / name).resolve()]))
    assert len(named) > 5
    assert [path for path in sorted(named) if not any((ROOT / root / path).exists() for root in roots)] == []


@pytest.mark.parametrize(
    "name", ["README.md", "docs/strategies.md", "docs/training.md", "docs/losses.md", "docs/fp8.md"]
)
def test_names_that_a_page_puts_in_code_exist(name: str) -> None:
    page = PAGES[ROOT / name]
    classes = set(re.findall(r"`(?:lightning_liger\.)?((?:Fabric)?Liger\w+|AutoLiger\w+|ContextParallel)[`(]", page))
    assert classes
    assert [each for each in classes if not hasattr(lightning_liger, each)] == []
    for strategy in re.findall(r"`\"?(liger_(?!kernel|report|ops)[a-z_0-9]+)\"?`", page):
        assert strategy in StrategyRegistry, strategy


def test_pages_have_every_strategy_and_every_type_of_loss() -> None:
    page = PAGES[DOCS / "strategies.md"]
    assert [each.name for each in REGISTRATIONS if f"`{each.name}`" not in page] == []
    types = {name for module in (dpo, cpo, tpo, kto, policy_options) for name in module.LOSS_TYPES}
    assert [name for name in sorted({*types, *KINDS, *MODES}) if f"`{name}`" not in PAGES[DOCS / "losses.md"]] == []


def test_every_page_is_in_the_navigation_or_for_contributors_who_are_led_to_it() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = re.findall(r"[\w/]+(?:\.md|/)(?=['\]}])", str(site["nav"]))
    assert {"index.md", "examples/", "api/"} <= set(named)
    first, *hidden = site["not_in_nav"].split()  # the first is CONTRIBUTING.md
    assert first == "contributing/index.md"
    assert "(CONTRIBUTING.md)" in PAGES[ROOT / "README.md"]
    for page in hidden:
        assert f"(docs/{page})" in PAGES[ROOT / "CONTRIBUTING.md"], page
    linked = re.findall(r"\]\((\w+\.md)\)", PAGES[DOCS / "examples" / "index.md"])
    named += ["examples/index.md", *(f"examples/{page}" for page in linked)]
    pages = {str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)}
    assert sorted(pages - {*named, *hidden}) == []


def _messages() -> Iterator[str]:
    """The strings of both packages, with dots for each value that is formatted into them."""
    for folder in (ROOT / "lightning_liger", ROOT / "kernels"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                elif isinstance(node, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)


def test_messages_on_the_page_of_troubleshooting_are_those_of_the_package() -> None:
    page = PAGES[DOCS / "troubleshooting.md"]
    printed = re.findall(r"^ *```output\n(.*?)^ *```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(printed) > 20
    messages = [message for message in _messages() if len(message) > 15]
    for message in printed:
        parts = [re.escape(part.strip()) for part in message.strip().split("...") if part.strip(" .,:;()")]
        assert any(re.search(".*".join(parts), known, flags=re.DOTALL) for known in messages), message
