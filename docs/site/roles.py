"""An extension of griffe: references in docstrings (``:func:`~package.name```) become links of the site."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(?:([^`<]+?)\s*<([^`>]+)>|(~?)([^`]+))`")
_BLOCK = re.compile(r"::\n\n((?:[ \t]+\S.*\n?|\n)+)")


class Roles(griffe.Extension):
    """Rewrites docstrings to Markdown."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value, obj)


def to_markdown(text: str, obj: griffe.Object) -> str:
    """``text`` with links for roles and fences for literal blocks."""

    def link(match: re.Match[str]) -> str:
        title, named, tilde, target = match.groups()
        target = named or target
        shown = title or (target.rpartition(".")[2] if tilde else target.lstrip("."))
        return f'<autoref optional identifier="{_found(target.lstrip("."), obj)}"><code>{shown}</code></autoref>'

    return _BLOCK.sub(_fenced, _ROLE.sub(link, text))


def _found(target: str, obj: griffe.Object) -> str:
    """The dotted path of ``target``, seen from ``obj``; as it is if nothing in the package has that name."""
    try:
        return obj.resolve(target)
    except (griffe.NameResolutionError, griffe.AliasResolutionError):
        return target


def _fenced(match: re.Match[str]) -> str:
    lines = match[1].rstrip().splitlines()
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    code = "\n".join(line[margin:] for line in lines)
    return f":\n\n```python\n{code}\n```\n\n"
