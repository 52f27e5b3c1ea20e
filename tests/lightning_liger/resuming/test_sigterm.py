"""Graceful shutdown relies on names that are private to Lightning, and says so when they are missing."""

import itertools

import lightning as L
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_liger.host_copy import HostCopy
from lightning_liger.resuming import sigterm
from tests.lightning_liger.resuming.workers.resume import fit


def test_ranks_exchange_the_signal_once_in_each_batch_and_read_it_at_its_end(tmp_path, monkeypatch):
    events = []

    def all_reduce(received, op):
        events.append("exchange")
        received.fill_(events.count("exchange") == 3)  # another rank got it

    def wait(copy):
        events.append("read")
        return copy._value

    class Batches(L.Callback):
        def on_before_backward(self, trainer, *_):
            events.append("step")
            loop = trainer.fit_loop.epoch_loop
            assert hasattr(type(loop), "_broadcast_sigterm_tensor")  # Lightning's exchange, which would wait
            loop._broadcast_sigterm_tensor()

    monkeypatch.setattr(sigterm, "_has_several_ranks", lambda trainer: True)
    monkeypatch.setattr(sigterm.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(HostCopy, "wait", wait)
    with pytest.raises(SIGTERMException):
        fit(tmp_path, strategy="liger", callbacks=[Batches()])
    assert [event for event, _ in itertools.groupby(events)] == ["exchange", "step", "read"] * 3


def test_lightning_without_the_handler_is_an_error_before_training(tmp_path, monkeypatch):
    monkeypatch.delattr(type(L.Trainer(accelerator="cpu", logger=False)._signal_connector), "_sigterm_notifier_fn")
    with pytest.raises(AttributeError, match="_sigterm_notifier_fn"):
        fit(tmp_path, strategy="liger")
