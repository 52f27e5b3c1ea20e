"""``python .ci/bounds.py torch==2.16.0 ...``: upper bounds in pyproject.toml follow versions that passed the tests.

A bound ``<a.b`` that a version reaches becomes the next minor version; lower bounds and other packages' stay.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

_BOUNDED = re.compile(r'^(?P<start> +"(?P<name>[\w-]+)[^"]*<)(?P<bound>\d+\.\d+)(?=[",])', re.MULTILINE)


def raised(text: str, versions: Mapping[str, str]) -> tuple[str, list[str]]:
    """The text of a pyproject.toml with raised bounds, and a line about each."""
    changes = []

    def replace(found: re.Match[str]) -> str:
        if found["name"] not in versions:
            return found[0]
        major, minor = (int(part) for part in versions[found["name"]].split(".")[:2])
        if (major, minor) < tuple(int(part) for part in found["bound"].split(".")):
            return found[0]
        changes.append(f"{found['name']}: <{found['bound']} is now <{major}.{minor + 1}")
        return f"{found['start']}{major}.{minor + 1}"

    return _BOUNDED.sub(replace, text), changes


if __name__ == "__main__":
    path = Path("pyproject.toml")
    pairs = (argument.split("==", 1) for argument in sys.argv[1:])
    text, changes = raised(path.read_text(encoding="utf-8"), dict(pairs))
    path.write_text(text, encoding="utf-8")
    print("\n".join(changes) or "all bounds are above these versions")
