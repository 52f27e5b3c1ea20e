"""``PredictionPrinter`` prints predicted rows as text, once."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_liger.callbacks.predictions import PredictionPrinter
from tests.lightning_liger.strategies.workers.distributed import LM, make_trainer

EOS = 0


class Letters:
    """Decodes 1 as a, 2 as b, ..., and leaves the end token out on request."""

    def decode(self, row: torch.Tensor, skip_special_tokens: bool) -> str:
        kept = [token for token in row.tolist() if token != EOS or not skip_special_tokens]
        return "".join(chr(96 + token) for token in kept)


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.text_tokenizer = Letters()

    def predict_dataloader(self):
        return DataLoader([torch.tensor([[8, 9, EOS], [2, 25, 5]]), torch.tensor([[14, 15, EOS]])], batch_size=None)


class Echo(LM):
    def predict_step(self, batch, batch_idx):
        return batch


def test_decoded_rows_are_printed(tmp_path, capsys):
    make_trainer(PredictionPrinter(), root=tmp_path).predict(Echo(), datamodule=Data())
    assert [line for line in capsys.readouterr().out.splitlines() if line in ("hi", "bye", "no")] == ["hi", "bye", "no"]


@pytest.mark.parametrize(
    ("tokenizer", "prediction", "is_zero"),
    [(None, torch.ones(1, 2).long(), True), (Letters(), None, True), (Letters(), torch.ones(1, 2).long(), False)],
)
def test_what_is_no_text_or_on_another_rank_is_not_printed(capsys, tokenizer, prediction, is_zero):
    trainer = SimpleNamespace(datamodule=SimpleNamespace(text_tokenizer=tokenizer), is_global_zero=is_zero)
    PredictionPrinter().write_on_batch_end(trainer, None, prediction, None, None, 0, 0)
    assert capsys.readouterr().out == ""
