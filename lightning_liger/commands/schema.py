"""``lightning-liger schema``: a JSON schema of the yaml files, with which editors complete and check them.

Options are those of the parsers that read the yaml files, types those of signatures, descriptions of docstrings.
"""

import collections.abc
import dataclasses
import enum
import importlib
import inspect
import json
import types
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import docstring_parser
import lightning as L
import torch

from lightning_liger.cli.help import plain
from lightning_liger.cli.mistakes import CLASSES, options_of
from lightning_liger.cli.training import LigerCLI, Summary
from lightning_liger.commands.writing import check_output, write_files

_DRAFT = "http://json-schema.org/draft-07/schema#"  # which all editors know
_SIMPLE = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", Path: "string"}
_MODULES = dict.fromkeys(name for names in CLASSES.values() for name in names)
"""The modules whose classes are known to the schema."""
_BASES: dict[str, Any] = {
    "model": L.LightningModule,
    "data": L.LightningDataModule,
    "optimizer": torch.optim.Optimizer,
    "lr_scheduler": torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau,
}
"""The options whose values are classes with their arguments."""


def run_schema(*, output: str | None = None) -> int:
    """Write a JSON schema of the yaml files, with which editors complete options and mark errors.

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
    found: dict[str, Any] = {}
    for subcommand, skipped in LigerCLI.subcommands().items():
        # Some need what others may leave out, such as ckpt_path.
        found = schema.options(LigerCLI.trainer_type, subcommand, skipped) | found
    seed = schema.for_type(bool | int)
    found["seed_everything"] = {**seed, "description": "Seed of all random number generators; true draws one."}
    found |= {"trainer": _object(schema.options(L.Trainer)), "summary": _object(schema.options(Summary))}
    found |= {name: schema.for_type(base | None) for name, base in _BASES.items()}
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

    def options(self, cls: type, method: str = "__init__", skip: Collection[str] = ()) -> dict[str, Any]:
        """The options of a class, or of one of its methods."""
        (defaults, hints), texts = options_of(cls, method, skip), dict[str, str | None]()
        for base in reversed(cls.__mro__):
            for text in map(inspect.getdoc, (vars(base).get(method), base)):
                texts |= {each.arg_name: each.description for each in docstring_parser.parse(text or "").params}
        found: dict[str, Any] = {}
        further = texts.get("**kwargs") or ""
        for name, default in defaults.items():
            hint, text = hints.get(name, Any), texts.get(name) or (further if f"``{name}``" in further else None)
            hint = hint.type if isinstance(hint, dataclasses.InitVar) else hint
            # Without `| None` in the signature, as in some of Lightning, None is written to yaml files too.
            found[name] = self.for_type(hint | None if default is None else hint)
            found[name] |= {"description": " ".join(plain(text).split())} if text else {}
            found[name] |= {"default": default} if isinstance(default, bool | int | float | str) else {}
        return found

    def for_type(self, hint: Any) -> dict[str, Any]:
        """The schema of a type; an empty one for types that yaml has no form of."""
        origin, args = get_origin(hint) or hint, get_args(hint)
        if origin in _SIMPLE:
            return {"type": _SIMPLE[origin]}
        if origin is Literal:
            return {"enum": list(args)}
        if origin in (Union, types.UnionType):
            options = [self.for_type(arg) for arg in args]
            return {} if {} in options else {"anyOf": options}
        if not inspect.isclass(origin) or origin in (Any, object):
            return {}
        if dataclasses.is_dataclass(origin):
            return _object(self.options(origin))
        if issubclass(origin, enum.Enum):
            return {"enum": list(origin.__members__)}
        if issubclass(origin, collections.abc.Mapping):
            return {"type": "object"}
        if issubclass(origin, collections.abc.Iterable) and args:
            is_list = issubclass(origin, collections.abc.Sequence) and origin is not tuple
            return {"type": "array", "items": self.for_type(args[0]) if is_list else {}}
        known = {cls: path for cls, path in self._paths.items() if issubclass(cls, origin)}
        return self._reference(f"any_{origin.__name__}", self._any_of, known) if known else {}

    def _reference(self, name: str, make: Callable[..., dict[str, Any]], of: Any) -> dict[str, Any]:
        if name not in self.definitions:
            self.definitions[name] = {}  # classes may refer to their own base
            self.definitions[name] = make(of)
        return {"$ref": f"#/definitions/{name}"}

    def _any_of(self, known: dict[type, str]) -> dict[str, Any]:
        paths: list[str] = []
        rules: list[dict[str, Any]] = []
        for cls, path in known.items():
            names = list(dict.fromkeys((path, cls.__name__, f"{cls.__module__}.{cls.__qualname__}")))
            paths += names
            condition = {"required": ["class_path"], "properties": {"class_path": {"enum": names}}}
            then = {"properties": {"init_args": self._reference(path, self._for_class, cls)}}
            rules.append({"if": condition, "then": then})
        other = {"type": "string", "not": {"pattern": "^lightning_liger\\."}}
        properties: dict[str, Any] = {"class_path": {"anyOf": [{"enum": paths}, other]}}
        properties |= {name: {"type": "object"} for name in ("init_args", "dict_kwargs")}
        return {"anyOf": [{"type": "string"}, {**_object(properties), "allOf": rules}]}

    def _for_class(self, cls: type) -> dict[str, Any]:
        text = (inspect.getdoc(cls) or "").partition("\n\n")[0]
        return {**_object(self.options(cls)), "description": plain(" ".join(text.split()))}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}
