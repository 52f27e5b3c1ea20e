"""Every bad input over the whole public surface raises an error that says what is wrong and what was expected."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from liger_ops.arguments import shown
from tests.bad_inputs import BadInput, annotations_of, named, public_callables, tables, wrong_values
from tests.valid_calls import ALIASES, HINTS, RESULTS, VALID

ARGUMENTS = [
    pytest.param(name, function, argument, annotation, id=f"{name.partition('.')[2]}-{argument}")
    for name, function in public_callables().items()
    if name.partition(".")[2] not in RESULTS
    for argument, annotation in annotations_of(function).items()
    if not named(HINTS.untried, name.partition(".")[2], argument)
]
EXPECTED = re.compile(r"must|expected|did you mean|needs|cannot|unknown|only", re.IGNORECASE)


def tensor_lines(value: Any) -> list[str]:
    """What messages may say of a wrong tensor."""
    if not isinstance(value, torch.Tensor):
        return []
    about = [str(value.dtype), str(tuple(value.shape)), str(value.device)]
    return [*about, str(value.item())] if value.numel() == 1 and not value.is_meta else about


@pytest.mark.parametrize(("name", "function", "argument", "annotation"), ARGUMENTS)
def test_wrong_values_of_every_argument_are_named(
    name: str, function: Callable[..., Any], argument: str, annotation: Any
) -> None:
    right, short = VALID.get(name, {}), name.partition(".")[2]
    first = next((each for each, value in right.items() if isinstance(value, torch.Tensor)), None)
    for value in wrong_values(short, argument, annotation, right.get(argument), HINTS, is_first=argument == first):
        if isinstance(value, nn.Module) and issubclass(type(function), type) and issubclass(function, nn.Module):
            continue  # PyTorch registers it as a child of a module that is not there yet
        try:
            function(**{**right, argument: value})
        except (TypeError, ValueError, FileNotFoundError, ConnectionError) as error:
            message = str(error)
        else:
            pytest.fail(f"{argument}={shown(value)} is taken")
        inner = map(shown, value) if isinstance(value, list | dict) else tensor_lines(value)
        texts = (shown(value), str(value), *inner)
        called = ALIASES.get(named(ALIASES, short, argument), argument.removeprefix("medusa_"))
        is_resized = isinstance(value, torch.Tensor) and value.shape != getattr(right.get(argument), "shape", None)
        assert called in message or (is_resized and str(value.shape[0]) in message), (shown(value), message)
        assert any(text in message for text in texts) or is_resized, (shown(value), message)
        assert EXPECTED.search(message), message


@pytest.mark.parametrize("bad_input", [pytest.param(bad_input, id=name) for name, bad_input in tables()])
def test_message_names_the_argument_its_value_and_what_was_expected(
    bad_input: BadInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(bad_input.mentions) >= 2, "at least the argument and the value"
    before = bad_input.unchanged and bad_input.unchanged()
    try:
        takes_path = "tmp_path" in inspect.signature(bad_input.call).parameters
    except ValueError:  # of a partial call with wrong names
        takes_path = False
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
