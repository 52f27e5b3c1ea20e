"""Rows of the datasets library: a split of a data set on the Hub, or a data set that is given as an object."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from liger_ops.arguments import wrong_type
from lightning_liger.data.records import Record
from lightning_liger.hub import snapshot

DataPath = str | Path | Sequence[dict[str, Any]]
"""Where data are: a file, a folder, a name on the Hub, or a ``datasets.Dataset`` or list of records itself."""


@dataclass(frozen=True)
class Table:
    """Rows that are loaded when they are first read."""

    described: str
    """The setting and its value, as messages name them."""
    key: tuple[Any, ...]
    """Determines the rows."""
    load: Callable[[], Any]

    @cached_property
    def rows(self) -> Any:
        return self.load()

    def records(self) -> Iterator[Record]:
        return (Record(row, f"{self.described}, row {number}") for number, row in enumerate(self.rows, start=1))


def given_table(setting: str, rows: Any) -> Table:
    """The rows of a ``datasets.Dataset`` or of a list of records; raises TypeError for anything else."""
    import datasets  # slow to import

    if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
        rows = datasets.Dataset.from_list(rows)
    if not isinstance(rows, datasets.Dataset):
        raise wrong_type(setting, "a path, owner/name on the Hub, a datasets.Dataset or a list of dicts", rows)
    return Table(f"{setting} (a datasets.Dataset)", (rows._fingerprint,), rows.with_format)


def hub_table(
    setting: str, name: str, split: str, *, subset: str | None, revision: str | None, streaming: bool
) -> Table:
    """A split of a data set on the Hub. Its commit is looked up now; errors are those of :func:`snapshot`."""
    commit = snapshot(setting, name, "README.md", revision=revision, repo_type="dataset").name
    given = {"split": split, "subset": subset, "revision": revision}
    described = ", ".join([f"{setting}={name!r}", *(f"{key}={value!r}" for key, value in given.items() if value)])
    load = partial(_load, described, name, subset, split=split, revision=commit, streaming=streaming)
    return Table(described, (name, subset, split, commit), load)


def _load(described: str, *args: Any, **options: Any) -> Any:
    import datasets

    try:
        return datasets.load_dataset(*args, **options)
    except Exception as error:  # of many types; its message lists the splits or subsets that there are
        raise ValueError(f"{described} cannot be loaded: {error}") from error
