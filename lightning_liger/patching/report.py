"""The report of replaced modules, of those that stayed and why, and how to undo the replacements."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class PatchEntry:
    """The modules of one structure and their replacement."""

    structure: str
    """Class of the modules."""
    kernel: str
    """Name of the kernel that was considered, as in ``kernels=[...]``."""
    count: int
    """How many modules."""
    replacement: str | None
    """Description of the replacement; None if they were not replaced."""
    error: float | None = None
    """Largest verified difference of outputs and gradients, relative to the largest value."""
    reason: str = ""
    """Why they were not replaced."""


@dataclass
class PatchReport:
    """The result of :func:`~lightning_liger.apply_liger_kernels`; printing it shows a table."""

    entries: list[PatchEntry] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def num_replaced(self) -> int:
        """Modules that this call replaced."""
        return sum(entry.count for entry in self.entries if entry.replacement is not None)

    def undo(self) -> None:
        """Restores every replaced module. A second call changes nothing."""
        while self._undo:
            self._undo.pop()()

    def as_dict(self) -> list[dict[str, Any]]:
        """The entries as plain data."""
        return [asdict(entry) for entry in self.entries]

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def __rich__(self) -> Table:
        table = Table(title="lightning-liger: fused kernels", title_justify="left", title_style="bold")
        for text, number in (("Module", "Count"), ("Replaced by", "Error")):
            table.add_column(text, overflow="fold")
            table.add_column(number, justify="right")
        for entry in self.entries:
            replaced = entry.replacement is not None
            table.add_row(
                entry.structure,
                str(entry.count),
                entry.replacement if replaced else f"- ({entry.reason})",
                "" if entry.error is None else f"{entry.error:.0e}" if entry.error else "exact",
                style=None if replaced else "dim",
            )
        if not self.entries:
            table.add_row("(none)", "0", "- (no module matches a chosen kernel)", "", style="dim")
        return table
