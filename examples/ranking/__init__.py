"""Ranking by click probability with a large vocabulary of ids; see ``docs/examples/ranking.md``."""

from .data import ClickData
from .generator import ClickModel
from .models import Ranker

__all__ = ["ClickData", "ClickModel", "Ranker"]
