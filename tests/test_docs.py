"""docs/models.md says what the code does."""

import re
import warnings
from pathlib import Path

import pytest
import transformers

from tests.lightning_liger.models_table import HEADER, row

PAGE = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
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
    root = Path(__file__).parents[1]
    page = (root / "docs" / "strategies.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 20
    for path, name in set(named):
        folder = "" if path.startswith("tests/") else "tests/lightning_liger/strategies"
        assert f"def {name}(" in (root / folder / path).read_text(encoding="utf-8"), (path, name)
