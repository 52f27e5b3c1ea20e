"""The pages in docs/ say what the code does."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from lightning_liger.strategies.registration import REGISTRATIONS
from benchmarks import docs_sections
from tests.lightning_liger.models_table import HEADER, row

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
ROWS = {line.split(" | ")[0].removeprefix("| "): line for line in PAGE.splitlines() if line.startswith("| ")}
VERSION = re.search(r"in transformers ([\d.]+)", PAGE)


def test_page_has_the_header_and_every_architecture() -> None:
    header = HEADER.format(version=VERSION.group(1))
    assert PAGE.startswith(header)
    assert len(ROWS) > 180


@pytest.mark.skipif(VERSION.group(1) != transformers.__version__, reason="written for another version of transformers")
@pytest.mark.parametrize("model_type", [name for name in ROWS if name != "architecture"])
def test_row_is_what_patching_finds(model_type: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert row(model_type) == ROWS[model_type] + "\n"


def test_tests_that_the_page_on_strategies_names_exist() -> None:
    page = (ROOT / "docs" / "contributing" / "strategy_tests.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 20
    for path, name in set(named):
        folder = "" if path.startswith("tests/") else "tests/lightning_liger/strategies"
        assert f"def {name}(" in (ROOT / folder / path).read_text(encoding="utf-8"), (path, name)


@pytest.mark.parametrize(("page", "section"), docs_sections.SECTIONS.values(), ids=list(docs_sections.SECTIONS))
def test_section_is_what_make_docs_writes(page: str, section: Callable[[], str]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    start, stop = docs_sections.bounds(text, section.__name__)
    assert text[start:stop].strip("\n") == section().strip("\n")


@pytest.mark.parametrize("name", docs_sections.STRATEGIES)
@pytest.mark.parametrize("user", ["Trainer", "Fabric"])
def test_page_has_the_class_order_of_a_strategy(name: str, user: str) -> None:
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    of_strategy = page.partition(f"\n`{name}`\n")[2]
    line = next(line for line in of_strategy.splitlines() if line.startswith(f"- {user}: "))
    order = docs_sections.class_order(docs_sections.strategy_class(name, user))
    assert re.findall(r"`(\w+)`", line) == [cls.__name__ for cls in order]
    assert order[-1].__module__.startswith("lightning.")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    for link in filter(None, links):
        assert (page.parent / link).exists(), link
    folders = ("lightning_liger", "kernels", "tests", "benchmarks", "docs", "examples")
    for path in re.findall(rf"`((?:{'|'.join(folders)})/[\w./]*)", text):
        assert (ROOT / path).exists(), path


def test_files_that_the_page_on_the_code_names_exist() -> None:
    """Its paths leave out the folder of the packages."""
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/.<])(?:\w+/)+(?:\w+\.py)?", page))
    assert len(named) > 30
    roots = (ROOT, ROOT / "lightning_liger", ROOT / "kernels", ROOT / "docs")
    assert [path for path in sorted(named) if not any((root / path).exists() for root in roots)] == []


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headings_that_a_page_links_to_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)\s#]*)#([\w-]+)\)", page.read_text(encoding="utf-8")):
        assert anchor in _anchors(page.parent / target if target else page), (target, anchor)


def test_page_on_strategies_has_every_name() -> None:
    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    assert [each.name for each in REGISTRATIONS if f"`{each.name}`" not in page] == []
