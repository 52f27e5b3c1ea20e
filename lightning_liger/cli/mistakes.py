"""Mistakes in options and yaml files, in one sentence with the closest name: jsonargparse's messages, shortened."""

import importlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser

from lightning_liger.cli.messages import PROGRAM, closest, end, one_sentence, shortened

CLASSES = {
    "model": ("lightning_liger",),
    "data": ("lightning_liger.data",),
    "trainer.strategy": ("lightning_liger", "lightning.pytorch.strategies"),
    "trainer.callbacks": ("lightning_liger", "lightning.pytorch.callbacks"),
    "trainer.logger": ("lightning.pytorch.loggers",),
    "trainer.profiler": ("lightning.pytorch.profilers",),
    "trainer.plugins": ("lightning_liger", "lightning.pytorch.plugins"),
    "optimizer": ("torch.optim",),
    "lr_scheduler": ("torch.optim.lr_scheduler",),
}
"""The modules whose classes are usual values of an option."""


_GROUPS = {"trainer": "max_steps: 10", "summary": "skip_steps: 2"}
"""The keys that hold settings and no class, with an example."""


def refuse(parser: ArgumentParser, message: str) -> NoReturn:
    """Ends the command with what is wrong with an option, and with the command that lists the options."""
    prog = parser.prog.replace(" [options]", "")
    end(f"{explained(message, parser)}\nOptions: {prog} --help")


def explained(message: str, parser: ArgumentParser) -> str:
    """A message of jsonargparse in one sentence."""
    text = shortened(message)
    if match := re.search(r"required: (.+)", text):
        *others, last = [name.rpartition(".")[2] for name in match[1].split(", ")]
        names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        is_positional = any(action.dest == last and not action.option_strings for action in parser._actions)
        how = f"{parser.prog} {last.upper()}" if is_positional else f"give a yaml file with --config, or --{last}=..."
        return f"{names} required: {how}"
    if match := re.search(r"unrecognized arguments: (--)?([\w.]+)", text):
        return f"{text}{_closest_option(match[2], parser)}"
    if match := re.search(r"does not accept option '([\w.]+)'", text):
        return f"{text}{_closest_option(match[1], parser)}"
    if not (keys := re.findall(r'(?:Parser key|option) "([\w.]+)":', text)):
        return one_sentence(text)
    key, value = ".".join(keys), _value(text)
    if match := re.search(r"Option '([\w.]+)' is not accepted", text):
        class_path = (re.findall(r"class_path '([^']+)'", text[: match.start()]) or [""])[-1]
        return f"{key}: {class_path}: option '{match[1]}' is not accepted{closest(match[1], _options(class_path))}"
    if match := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", text):
        return f"{key}: {match[0]}{closest(match[2], vars(importlib.import_module(match[1])))}"
    if match := re.search(r"Expected a dot import path string: (\S+)", text):
        hint = closest(match[1], _class_names(key))
        if not hint and key == "trainer.strategy":
            hint = ": with options, a strategy is given by its class, such as lightning_liger.LigerFSDPStrategy"
        return f"{key} must be the name of a class that is imported, or module.Class, got {match[1]!r}{hint}"
    if match := re.search(r"does not correspond to a subclass of (\w+)", text):
        return f"{key} must be a subclass of {match[1]}, got {value}"
    if match := re.search(r"class_path '[^']+':\s+(No module named .*)", text):
        return f"{key}: {' '.join(match[0].split())}"
    if choices := re.findall(r"'([\w.-]+)'", "".join(re.findall(r"Literal\[(.*?)\]", text))):
        return f"{key} must be one of {', '.join(map(repr, choices))}, got {value}{closest(value, choices)}"
    text = re.sub(r'Parser key "[\w.]+":|- Problem with given class_path \'[^\']+\':', "", text)
    return f"{key}: {one_sentence(text)}"


def _closest_option(name: str, parser: ArgumentParser) -> str:
    """The option that is closest to the whole of ``name`` or, for options of classes, to its first part."""
    names = list(parser.get_defaults().keys())
    return closest(name, names) or closest(name.partition(".")[0], {each.partition(".")[0] for each in names})


def _value(text: str) -> str:
    match = re.search(r"(?:Given value|Got value): (.*)", text)
    return match[1] if match else ""


def _options(class_path: str) -> list[str]:
    """The names of the options of a class."""
    module, _, name = class_path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    added: list[Any] = ArgumentParser().add_class_arguments(found, "it", fail_untyped=False)
    return [str(each).partition(".")[2] for each in added]


def _class_names(key: str) -> list[str]:
    modules = [importlib.import_module(name) for name in CLASSES.get(key, ())]
    return [name for module in modules for name in vars(module) if name[:1].isupper()]


def check_yaml_files(args: Iterable[str]) -> None:
    """Ends the command if a file after ``--config`` is no yaml with settings; the message names file and line."""
    before = ""
    for argument in args:
        option, _, path = argument.partition("=")
        if before in ("-c", "--config"):
            option, path = before, argument
        before = argument
        if option in ("-c", "--config") and Path(path).is_file():
            _check_yaml(Path(path))


def _check_yaml(path: Path) -> None:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = " ".join(filter(None, (getattr(error, name, None) for name in ("context", "problem")))) or str(error)
        end(f"parsing config {path}{where}: {problem}")
    if not isinstance(content, dict):
        kind = "nothing" if content is None else f"a {type(content).__name__}"
        expected = "a yaml file with settings such as `trainer:`"
        end(f"config must be {expected}, got {path}, which holds {kind}: `{PROGRAM} init` writes one")
    try:
        json.dumps(content, skipkeys=True, default=str)
    except ValueError:
        end(f"config must be a yaml file without aliases inside of what they stand for, got {path}")
    for name in sorted(_GROUPS.keys() & content.keys()):
        if not isinstance(content[name], dict):
            end(f"{name} must be settings such as `{_GROUPS[name]}`, got {content[name]!r} in {path}")
