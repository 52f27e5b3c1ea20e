"""Every bad input over the whole public surface raises an error that says what is wrong and what was expected."""

import inspect
from pathlib import Path

import pytest

from tests.bad_inputs import BadInput, tables

TABLES = list(tables())


@pytest.mark.parametrize(
    "bad_input", [pytest.param(row, id=f"{name.rpartition('_')[2]}-{row.id}") for name, row in TABLES]
)
def test_message_names_the_argument_its_value_and_what_was_expected(
    bad_input: BadInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bad_input.unchanged and bad_input.unchanged()
    takes_path = "tmp_path" in inspect.signature(bad_input.call).parameters

    with pytest.raises(bad_input.error) as raised:
        bad_input.call(tmp_path) if takes_path else bad_input.call()

    message = str(raised.value)
    if isinstance(raised.value, SystemExit):
        assert raised.value.code == 2
        message = capsys.readouterr().err
        assert "Traceback" not in message
    missing = [text for text in bad_input.mentions if text.lower() not in message.lower()]
    assert not missing, f"{missing} not in: {message}"
    assert bad_input.unchanged is None or bad_input.unchanged() == before


def test_tables_cover_the_public_surface() -> None:
    ids = [(name, row.id) for name, row in TABLES]
    assert len(set(ids)) == len(ids)
    assert len(ids) >= 500
    assert all(len(row.mentions) >= 2 for _, row in TABLES), "a row checks at least the argument and the value"
