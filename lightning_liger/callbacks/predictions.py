"""Printing the text that ``predict`` generated."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from typing_extensions import override


class PredictionPrinter(BasePredictionWriter):
    """Prints each predicted row of tokens as text, decoded by the data module's ``text_tokenizer``."""

    def __init__(self) -> None:
        super().__init__(write_interval="batch")

    @override
    def write_on_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, prediction: Any, *_: Any, **__: Any
    ) -> None:
        tokenizer = getattr(getattr(trainer, "datamodule", None), "text_tokenizer", None)
        if trainer.is_global_zero and tokenizer is not None and isinstance(prediction, torch.Tensor):
            for row in prediction:
                print(tokenizer.decode(row, skip_special_tokens=True))
