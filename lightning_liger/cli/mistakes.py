"""Mistakes in options and yaml files: where jsonargparse refuses them, the first wrong name or value is looked for."""

import importlib
import inspect
import itertools
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from lightning_liger.cli.messages import PROGRAM, closest, end, in_one_line

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


def refuse(parser: ArgumentParser, args: Sequence[str], hints: Mapping[str, Any], error: Exception) -> NoReturn:
    """Ends the command with what is wrong with its options, of which some have types, and what lists them."""
    names = [str(name) for name in parser.get_defaults().keys()]  # noqa: SIM118  # of a Namespace
    known = _Names(names, hints)
    found = (text for key, value in _given(args) for text in known.mistakes(key, value))
    text = next(found, "") or in_one_line(str(error))
    if "trainer.devices" in names and "--config" not in " ".join(args):
        text += "; give a yaml file with --config"
    end(f"{text}\nOptions: {parser.prog.replace(' [options]', '')} --help")


def _configs(args: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Each option with its value, and whether it names a yaml file."""
    for arg, after in itertools.pairwise([*args, ""]):
        option, has_value, value = arg.partition("=")
        if option.startswith("--") or option == "-c":
            yield option, value if has_value else after, option in ("-c", "--config")


def _given(args: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The keys of options and of yaml files with their values, in the order in which they are read."""
    for option, text, is_file in _configs(args):
        with suppress(OSError, ValueError, yaml.YAMLError):
            if is_file:
                content = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
                yield from content.items() if isinstance(content, dict) else ()
            else:
                is_yaml = text[:1] in ("[", "{") or text == "null"
                yield option[2:].removesuffix("+"), yaml.safe_load(text) if is_yaml else text


class _Names:
    """Looks for names that are not known and values that do not fit."""

    def __init__(self, names: Sequence[str], hints: Mapping[str, Any]) -> None:
        self._names, self._hints = names, hints
        self._classes: dict[str, Any] = {}

    def mistakes(self, key: str, value: Any) -> Iterator[str]:
        known = next((name for name in self._names if f"{key}.".startswith(f"{name}.")), "")
        if known in CLASSES:
            option = key[len(known) + 1 :].removeprefix("init_args.")
            value = {"init_args": {option: value}} if option else value
            for each in value if isinstance(value, list) else [value]:
                yield from self._for_class(known, each)
        elif known:
            yield from _wrong_value(key, self._hints.get(known), value)
        elif isinstance(value, dict) and any(name.startswith(f"{key}.") for name in self._names):
            for name, each in value.items():
                yield from self.mistakes(f"{key}.{name}", each)
        elif not key.endswith("help") and key not in ("print_config", "config"):
            groups = {name.partition(".")[0] for name in self._names}
            hint = closest(key, self._names if "." in key else groups) or closest(key.partition(".")[0], groups)
            yield f"{key} is not an option{hint}"

    def _for_class(self, key: str, value: Any) -> Iterator[str]:
        described = value if isinstance(value, dict) else {"class_path": value}
        path, options = described.get("class_path"), described.get("init_args")
        if isinstance(path, str):
            self._classes[key] = named = _find_class(key, path)
            if isinstance(named, str) and (key != "trainer.strategy" or isinstance(value, dict)):  # else a name
                yield named
        found = self._classes.get(key)
        if not isinstance(options, dict):
            return
        if inspect.isclass(found):
            names, hints = options_of(found)
            for name, given in options.items():
                first = str(name).partition(".")[0]
                if first not in names:
                    yield f"{key}.{name} is not an option of {found.__name__}{closest(first, names)}"
                elif first == name:
                    yield from _wrong_value(f"{key}.{name}", hints.get(name), given)
        elif path is None and key == "trainer.strategy":
            yield f"{key} must be a class if it has options, such as lightning_liger.LigerFSDPStrategy"


def _find_class(key: str, path: str) -> type | str:
    """The class of a key, or what is wrong with its path."""
    module, _, name = path.rpartition(".")
    try:
        modules = [importlib.import_module(each) for each in ([module] if module else CLASSES[key])]
    except ImportError as error:
        return f"{key}: {path}: {error}"
    found = next((getattr(each, name) for each in modules if hasattr(each, name)), None)
    if inspect.isclass(found):
        return found
    hint = closest(name, [each for known in modules for each in vars(known) if each[:1].isupper()])
    return f"{key} must be the name of a class that is imported, or module.Class, got {path!r}{hint}"


def options_of(
    cls: type, method: str = "__init__", skip: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a class, or of one of its methods, with their defaults, and the types of those that have one."""
    parser = ArgumentParser()
    if method == "__init__":
        added: list[Any] = parser.add_class_arguments(cls, "it", fail_untyped=False)
    else:
        added = parser.add_method_arguments(cls, method, "it", skip=set(skip), fail_untyped=False)
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):  # a class may pass options on to its bases
        with suppress(Exception):  # of annotations that cannot be read
            hints |= get_type_hints(vars(base)[method])
    defaults, names = parser.get_defaults().get("it") or {}, (str(name).split(".")[1] for name in added)
    return {name: defaults.get(name) for name in names}, hints


def _wrong_value(key: str, hint: Any, value: Any) -> Iterator[str]:
    """What was expected, if a value does not fit a type."""
    if hint is None:
        return
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    try:
        parser.parse_args([f"--value={value}"]) if isinstance(value, str) else parser.parse_object({"value": value})
    except ArgumentError:
        parts = _flat(hint)
        choices = [each for each in parts if isinstance(each, str)]
        words = [repr(each) if isinstance(each, str | int) else getattr(each, "__name__", str(each)) for each in parts]
        expected = f"one of {', '.join(words)}" if choices else " or ".join(words)
        expected = f"one of {len(words)} names that --help lists" if len(words) > 20 else expected
        yield f"{key} must be {expected}, got {value!r}{closest(str(value), choices)}"


def _flat(hint: Any) -> list[Any]:
    """The types in a union, and the values in literal ones."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return [each for part in get_args(hint) if part is not type(None) for each in _flat(part)]
    return [hint]


def check_yaml_files(args: Sequence[str]) -> None:
    """Ends the command if a file after ``--config`` is no yaml with settings; the message names file and line."""
    for path in (Path(value) for _, value, is_file in _configs(args) if is_file and Path(value).is_file()):
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            problem = " ".join(filter(None, (getattr(error, name, None) for name in ("context", "problem"))))
            end(f"parsing config {path}{where}: {problem or error}")
        if not isinstance(content, dict):
            kind = "nothing" if content is None else f"a {type(content).__name__}"
            expected = "a yaml file with settings such as `trainer:`"
            end(f"config must be {expected}, got {path}, which holds {kind}: `{PROGRAM} init` writes one")
        for name in sorted(_GROUPS.keys() & content.keys()):
            if not isinstance(content[name], dict):
                end(f"{name} must be settings such as `{_GROUPS[name]}`, got {content[name]!r} in {path}")
