"""``lightning-liger schema``: a JSON schema of the yaml files, with which editors complete and check them.

It is made from the parsers that read the yaml files: types from signatures, descriptions from docstrings.
"""

import collections.abc
import enum
import importlib
import inspect
import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser, capture_parser

from lightning_liger.cli.help import plain
from lightning_liger.cli.mistakes import CLASSES
from lightning_liger.cli.training import LigerCLI
from lightning_liger.commands.writing import check_output, write_files

_DRAFT = "http://json-schema.org/draft-07/schema#"  # which all editors know
_SIMPLE = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", Path: "string"}
_MODULES = dict.fromkeys(name for names in CLASSES.values() for name in names)
"""The modules whose classes are known to the schema."""


def run_schema(*, output: str | None = None) -> int:
    """Write a JSON schema of the yaml files, with which editors complete options and mark mistakes.

    Args:
        output: The file to write, by default the screen. A yaml file names it in its first line:
            # yaml-language-server: $schema=FILE
    """
    if output is not None:
        check_output(output)
    text = json.dumps(make_schema(), indent=1)
    if output is None:
        print(text)
    else:
        write_files({Path(output): f"{text}\n".encode()})
        print(f"wrote {output}\n\nNext: begin yaml files with `# yaml-language-server: $schema={output}`")
    return 0


def make_schema() -> dict[str, Any]:
    """The JSON schema (draft 7) of the yaml files of all subcommands.

    Nothing is required, because several files may be given together. Known classes accept their own options only; other
    classes accept any, and so do additions to another file, which names the class.
    """
    schema = _Schema()
    found = schema.properties_of(capture_parser(lambda: LigerCLI(run=False)))
    for subcommand, skipped in LigerCLI.subcommands().items():
        parser = ArgumentParser()
        parser.add_method_arguments(LigerCLI.trainer_type, subcommand, skip=skipped, fail_untyped=False)
        found = schema.properties_of(parser) | found  # some need what others may leave out, such as ckpt_path
    return {"$schema": _DRAFT, "title": "lightning-liger", **_object(found), "definitions": schema.definitions}


class _Schema:
    """Makes schemas of options; those of classes are collected in ``definitions``."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._paths: dict[type, str] = {}
        for module in _MODULES:
            for name, value in vars(importlib.import_module(module)).items():
                if inspect.isclass(value) and not name.startswith("_"):
                    self._paths.setdefault(value, f"{module}.{name}")

    def properties_of(self, parser: ArgumentParser) -> dict[str, Any]:
        """The options of a parser, those with dots in their names as nested objects."""
        found: dict[str, Any] = {}
        for action in parser._actions:
            if not hasattr(action, "_typehint"):
                continue  # --help, --config and such
            *parents, name = action.dest.split(".")
            properties = found
            for parent in parents:
                properties = properties.setdefault(parent, _object({}))["properties"]
            described = {"description": " ".join(plain(action.help).split())} if action.help else {}
            default = {"default": action.default} if isinstance(action.default, bool | int | float | str) else {}
            # Without `| None` in the signature, as in some of Lightning, None is written to yaml files too.
            hint = action._typehint if action.required or action.default is not None else action._typehint | None
            properties[name] = {**self.of_type(hint), **described, **default}
        return found

    def of_type(self, hint: Any) -> dict[str, Any]:
        """The schema of a type; an empty one for types that yaml has no form of."""
        origin, args = get_origin(hint) or hint, get_args(hint)
        if origin in _SIMPLE:
            return {"type": _SIMPLE[origin]}
        if origin is Literal:
            return {"enum": list(args)}
        if origin in (Union, types.UnionType):
            options = [self.of_type(arg) for arg in args]
            return {} if {} in options else {"anyOf": options}
        if not inspect.isclass(origin):
            return {}
        if issubclass(origin, enum.Enum):
            return {"enum": list(origin.__members__)}
        if issubclass(origin, collections.abc.Mapping):
            return {"type": "object"}
        if issubclass(origin, collections.abc.Iterable) and args:
            items = (
                self.of_type(args[0]) if issubclass(origin, collections.abc.Sequence) and origin is not tuple else {}
            )
            return {"type": "array", "items": items}
        return self._of_subclasses(origin)

    def _of_subclasses(self, base: type) -> dict[str, Any]:
        """A reference to the schema of all known subclasses of ``base``; an empty one if none is known."""
        known = {cls: path for cls, path in self._paths.items() if issubclass(cls, base)} if base is not object else {}
        if not known:
            return {}
        name = f"any_{base.__name__}"
        if name not in self.definitions:
            self.definitions[name] = {}  # classes may refer to their own base
            self.definitions[name] = self._any_of(known)
        return {"$ref": f"#/definitions/{name}"}

    def _any_of(self, known: dict[type, str]) -> dict[str, Any]:
        paths: list[str] = []
        rules: list[dict[str, Any]] = []
        for cls, path in known.items():
            names = list(dict.fromkeys((path, cls.__name__, f"{cls.__module__}.{cls.__qualname__}")))
            if path not in self.definitions:
                self.definitions[path] = {}
                self.definitions[path] = self._of_class(cls)
            paths += names
            rules.append(_if_class({"enum": names}, {"$ref": f"#/definitions/{path}"}))
        other = {"type": "string", "not": {"pattern": "^lightning_liger\\."}}
        properties = {
            "class_path": {"anyOf": [{"enum": paths}, other]},
            "init_args": {"type": "object"},
            "dict_kwargs": {"type": "object"},
        }
        return {"anyOf": [{"type": "string"}, {**_object(properties), "allOf": rules}]}

    def _of_class(self, cls: type) -> dict[str, Any]:
        parser = ArgumentParser()
        parser.add_class_arguments(cls, fail_untyped=False)
        text = (inspect.getdoc(cls) or "").partition("\n\n")[0]
        return {**_object(self.properties_of(parser)), "description": plain(" ".join(text.split()))}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _if_class(class_path: dict[str, Any], init_args: dict[str, Any]) -> dict[str, Any]:
    condition = {"required": ["class_path"], "properties": {"class_path": class_path}}
    return {"if": condition, "then": {"properties": {"init_args": init_args}}}
