"""Commands made from functions: the arguments become options, the docstring their help."""

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import docstring_parser
from jsonargparse import ArgumentError, ArgumentParser

from lightning_liger.cli.help import Formatter, plain
from lightning_liger.cli.messages import PROGRAM
from lightning_liger.cli.mistakes import refuse


def run_function(name: str, target: str, args: Sequence[str]) -> int:
    """Runs the function ``target``, ``module:function``, with its arguments parsed from ``args``.

    A function with a parameter ``*options`` gets all options that it does not know, to pass them on.
    """
    function: Callable[..., int] = pkgutil.resolve_name(target)
    parameters = inspect.signature(function).parameters.values()
    own, others = list(args), list[str]()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        known, own = {"-h", "--help", *(f"--{parameter.name}" for parameter in parameters)}, []
        chosen = others
        for arg in args:
            if arg.startswith("-"):
                chosen = own if arg.partition("=")[0] in known else others
            chosen.append(arg)
    parser = parser_of(name, function)
    try:
        options = parser.parse_args(own).as_dict()
    except ArgumentError as error:
        refuse(parser, own, get_type_hints(function), error)
    return function(*others, **options)


def parser_of(name: str, function: Callable[..., Any]) -> ArgumentParser:
    """A parser with an option for each argument of ``function``; those without a default are positional."""
    documentation, types = docstring_parser.parse(inspect.getdoc(function) or ""), get_type_hints(function)
    helps = {parameter.arg_name: parameter.description for parameter in documentation.params}
    paragraphs = filter(None, (documentation.short_description, documentation.long_description))
    options: dict[str, Any] = {"prog": f"{PROGRAM} {name}", "description": plain("\n\n".join(paragraphs))}
    parser = ArgumentParser(**options, formatter_class=Formatter, exit_on_error=False)
    for each in inspect.signature(function).parameters.values():
        options = {"help": helps.get(each.name)}
        if each.default is False:
            options["action"] = "store_true"
        else:
            options["type"] = types[each.name]
            if each.default is not inspect.Parameter.empty:
                options["default"] = each.default
        if each.kind is inspect.Parameter.KEYWORD_ONLY or each.default is False:
            parser.add_argument(f"--{each.name}", **options)
        elif each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            if "default" in options:
                options["nargs"] = "?"
            parser.add_argument(each.name, **options)
    return parser
