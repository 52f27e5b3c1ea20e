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


@pytest.mark.parametrize("is_global_zero", [True, False])
def test_decoded_rows_are_printed_on_rank_zero_only(tmp_path, capsys, monkeypatch, is_global_zero):
    trainer = make_trainer(PredictionPrinter(), root=tmp_path)
    monkeypatch.setattr(type(trainer), "is_global_zero", is_global_zero)
    trainer.predict(Echo(), datamodule=Data())
    printed = [line for line in capsys.readouterr().out.splitlines() if line in ("hi", "bye", "no")]
    assert printed == (["hi", "bye", "no"] if is_global_zero else [])


def test_what_is_no_text_is_not_printed(capsys):
    for tokenizer, prediction in ((None, torch.ones(1, 2).long()), (Letters(), {"loss": 1.0}), (Letters(), None)):
        trainer = SimpleNamespace(datamodule=SimpleNamespace(text_tokenizer=tokenizer), is_global_zero=True)
        PredictionPrinter().write_on_batch_end(trainer, None, prediction, None, None, 0, 0)
    assert capsys.readouterr().out == ""
