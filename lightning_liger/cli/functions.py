"""Commands made from functions: the arguments become options, the docstring their help."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import docstring_parser
from jsonargparse import ArgumentError, ArgumentParser

from lightning_liger.cli.help import Formatter, plain
from lightning_liger.cli.messages import PROGRAM
from lightning_liger.cli.mistakes import refuse


def run_function(name: str, target: str, args: Sequence[str]) -> int:
    """Runs the function ``target``, ``module:function``, with its arguments parsed from ``args``."""
    module, _, attribute = target.partition(":")
    function: Callable[..., int] = getattr(importlib.import_module(module), attribute)
    own, others = _split(function, args)
    parser = parser_of(name, function)
    try:
        options = parser.parse_args(own).as_dict()
    except ArgumentError as error:
        refuse(parser, own, get_type_hints(function), error)
    return function(*others, **options)


def _split(function: Callable[..., int], args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line of ``function``, and what it passes on to another command: it has a parameter ``*options``."""
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return list(args), []
    names = {"-h", "--help", *(f"--{parameter.name}" for parameter in parameters)}
    own: list[str] = []
    others: list[str] = []
    chosen = others
    for arg in args:
        if arg.startswith("-"):
            chosen = own if arg.partition("=")[0] in names else others
        chosen.append(arg)
    return own, others


def parser_of(name: str, function: Callable[..., Any]) -> ArgumentParser:
    """A parser with an option for each argument of ``function``; those without a default are positional."""
    documentation = docstring_parser.parse(inspect.getdoc(function) or "")
    helps = {parameter.arg_name: parameter.description for parameter in documentation.params}
    paragraphs = (documentation.short_description, documentation.long_description)
    description = plain("\n\n".join(filter(None, paragraphs)))
    parser = ArgumentParser(
        prog=f"{PROGRAM} {name}", description=description, formatter_class=Formatter, exit_on_error=False
    )
    types = get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        kind, default, text = types[parameter.name], parameter.default, helps.get(parameter.name)
        if default is inspect.Parameter.empty:
            parser.add_argument(parameter.name, type=kind, help=text)
        elif default is False:
            parser.add_argument(f"--{parameter.name}", action="store_true", help=text)
        elif parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            parser.add_argument(parameter.name, type=kind, default=default, nargs="?", help=text)
        else:
            parser.add_argument(f"--{parameter.name}", type=kind, default=default, help=text)
    return parser
