"""Logs in the format of the Criteo display advertising data: fields separated by tabs, without a header.

A line is the label, integers, and categories as 8 hexadecimal digits. Missing fields are empty. Criteo's own files have
13 integers and 26 categories.
"""

from pathlib import Path

import numpy as np

from .generator import MISSING, ClickLog


def write_log(path: str | Path, log: ClickLog) -> None:
    """Writes ``log`` without its probabilities."""
    with Path(path).open("w", encoding="ascii") as file:
        for label, integers, categories in zip(log.labels, log.integers.tolist(), log.categories.tolist(), strict=True):
            fields = [str(value) if value != MISSING else "" for value in integers]
            fields += [f"{value:08x}" if value != MISSING else "" for value in categories]
            file.write("\t".join((str(label), *fields)) + "\n")


def read_log(path: str | Path, num_integers: int) -> ClickLog:
    """The log in a file; integers below 0, of which Criteo has a few, become 0.

    Raises:
        ValueError: For a line with another number of fields than the first one, or with a field of another form.
    """
    lines = Path(path).read_text(encoding="ascii").splitlines()
    rows = [line.split("\t") for line in lines]
    lengths = np.array([len(row) for row in rows])
    if not len(rows) or lengths[0] <= num_integers + 1 or (lengths != lengths[0]).any():
        wrong = int((lengths != lengths[0]).argmax()) if len(rows) else 0
        raise ValueError(
            f"{path} must have the label, {num_integers} integers and at least one category in each line, separated by"
            f" tabs; got {len(rows[wrong]) if rows else 0} fields in line {wrong + 1}"
        )
    integers = [[max(0, int(field)) if field else MISSING for field in row[1 : num_integers + 1]] for row in rows]
    categories = [[int(field, 16) if field else MISSING for field in row[num_integers + 1 :]] for row in rows]
    return ClickLog(np.array([int(row[0]) for row in rows]), np.array(integers), np.array(categories))
