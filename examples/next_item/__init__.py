"""Next-item prediction with a large catalog; see ``docs/examples/next_item.md``."""

from .data import NextItemData
from .generator import Course
from .models import NextItem

__all__ = ["Course", "NextItem", "NextItemData"]
