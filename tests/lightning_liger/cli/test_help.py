"""The text of ``--help`` fits a terminal, and explains every option."""

import inspect
import re
import sys

import pytest
from jsonargparse import capture_parser

from lightning_liger.cli import main
from lightning_liger.cli.functions import parser_of
from lightning_liger.cli.help import SUBCOMMANDS, first_level, plain
from lightning_liger.cli.training import LigerCLI
from lightning_liger.commands import COMMANDS
from lightning_liger.commands.inspect import run_inspect


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["lightning-liger"])


def test_first_level_names_every_subcommand_on_less_than_two_screens(capsys):
    lines = first_level().splitlines()
    assert len(lines) <= 2 * 24
    assert max(map(len, lines)) <= 80
    names = [name for group in SUBCOMMANDS.values() for name in group]
    assert sorted(names) == sorted({*LigerCLI.subcommands(), *COMMANDS})
    for name in names:
        assert re.search(rf"^  {name} +[A-Z].*\.$", first_level(), flags=re.MULTILINE)
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == f"{first_level()}\n"


@pytest.mark.parametrize("subcommand", LigerCLI.subcommands())
def test_help_of_a_subcommand_is_grouped_and_explains_every_option(subcommand, capsys):
    with pytest.raises(SystemExit) as ended:
        main([subcommand, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    text = " ".join(printed.split())
    assert text.startswith(f"usage: lightning-liger {subcommand} --config FILE")
    assert SUBCOMMANDS["Train" if subcommand in SUBCOMMANDS["Train"] else "Models"][subcommand] in text
    assert not re.search(r":\w+:`|``|<class ", text)
    for heading in ("Trainer: ", "Model: ", "Data: ", "Optimizer, ", "Schedule of ", "Summary at "):
        assert re.search(rf"^{heading}", printed, flags=re.MULTILINE), heading
    options = re.split(r"\n  (?=-)", printed)[1:]
    assert len(options) > 60
    assert [option for option in options if not re.search(r"\s{2,}[\w\"(]", option.partition("\n\n")[0])] == []
    assert max(map(len, printed.splitlines())) <= 100  # argparse does not break names of groups and options


def test_markup_of_docstrings_is_left_out():
    assert plain("``a`` and :class:`~b.c.D`, :func:`e`, :paramref:`~f.g.h`") == "a and D, e, h"


def test_arguments_of_a_function_become_options():
    parser = parser_of("inspect", run_inspect)
    defaults = {name: each.default for name, each in inspect.signature(run_inspect).parameters.items()}
    given = {"model": "m", "config": {"a": 1}, "seq_len": 3, "memory_budget": 0.5, "json": True}
    arguments = ["m", "--config.a=1", "--seq_len", "3", "--memory_budget=0.5", "--json"]
    assert parser.parse_args(arguments).as_dict() == defaults | given
    assert parser.parse_args(["m"]).as_dict() == defaults | {"model": "m"}
    text = " ".join(parser.format_help().split())
    assert text.startswith("usage: lightning-liger inspect ")
    assert all(
        part in text for part in ("what fits on a GPU. Needs no GPU ", "A folder with config.json", "Print JSON, ")
    )


def test_one_parser_is_made_for_a_named_subcommand():
    assert "{fit}" in capture_parser(lambda: LigerCLI(args=["fit"])).format_usage()
