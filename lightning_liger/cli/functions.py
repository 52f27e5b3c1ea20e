"""Commands made from functions: the arguments become options, the docstring their help."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, get_type_hints

import docstring_parser
from jsonargparse import ArgumentParser
from typing_extensions import override

from lightning_liger.cli.help import Formatter, plain
from lightning_liger.cli.messages import PROGRAM, end, shortened


class _Parser(ArgumentParser):
    """Prints what is wrong with an option, and how to list the options, instead of the list."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        end(f"{shortened(message)}\nOptions: {self.prog} --help")


def run_function(name: str, target: str, args: Sequence[str]) -> int:
    """Runs the function ``target``, ``module:function``, with its arguments parsed from ``args``."""
    module, _, attribute = target.partition(":")
    function: Callable[..., int] = getattr(importlib.import_module(module), attribute)
    return function(**parser_of(name, function).parse_args(list(args)).as_dict())


def parser_of(name: str, function: Callable[..., Any]) -> ArgumentParser:
    """A parser with an option for each argument of ``function``; those without a default are positional."""
    documentation = docstring_parser.parse(inspect.getdoc(function) or "")
    helps = {parameter.arg_name: parameter.description for parameter in documentation.params}
    paragraphs = (documentation.short_description, documentation.long_description)
    description = plain("\n\n".join(filter(None, paragraphs)))
    parser = _Parser(prog=f"{PROGRAM} {name}", description=description, formatter_class=Formatter)
    types = get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
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
