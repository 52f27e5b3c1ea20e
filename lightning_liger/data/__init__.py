"""Text for language models: sources, tokenizers, and data modules."""

from lightning_liger.data.collate import (
    FeedbackCollator,
    Layout,
    PreferenceCollator,
    RolloutCollator,
    SupervisedCollator,
    TeacherTopKCollator,
)
from lightning_liger.data.text import TextDataModule

__all__ = [
    "FeedbackCollator",
    "Layout",
    "PreferenceCollator",
    "RolloutCollator",
    "SupervisedCollator",
    "TeacherTopKCollator",
    "TextDataModule",
]
