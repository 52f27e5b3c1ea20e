"""Data modules, and all that they are made of: sources, tokenizers, records, collators."""

from lightning_liger.data.collate import (
    FeedbackCollator,
    Layout,
    MultipleChoiceCollator,
    PreferenceCollator,
    RolloutCollator,
    SupervisedCollator,
    TeacherTopKCollator,
)
from lightning_liger.data.completions import ConversationDataModule, PromptCompletionDataModule
from lightning_liger.data.examples import ExamplesDataModule
from lightning_liger.data.images import ImageTextCollator, ImageTextDataModule
from lightning_liger.data.multiple_choice import MultipleChoiceDataModule
from lightning_liger.data.packing import PackedStream
from lightning_liger.data.preference import PreferenceDataModule, UnpairedFeedbackDataModule
from lightning_liger.data.rollouts import RolloutDataModule
from lightning_liger.data.teacher_topk import TeacherTopKDataModule, tokenizer_hash, write_teacher_topk
from lightning_liger.data.text import TextDataModule

__all__ = [
    "ConversationDataModule",
    "ExamplesDataModule",
    "FeedbackCollator",
    "ImageTextCollator",
    "ImageTextDataModule",
    "Layout",
    "MultipleChoiceCollator",
    "MultipleChoiceDataModule",
    "PackedStream",
    "PreferenceCollator",
    "PreferenceDataModule",
    "PromptCompletionDataModule",
    "RolloutCollator",
    "RolloutDataModule",
    "SupervisedCollator",
    "TeacherTopKCollator",
    "TeacherTopKDataModule",
    "TextDataModule",
    "UnpairedFeedbackDataModule",
    "tokenizer_hash",
    "write_teacher_topk",
]
