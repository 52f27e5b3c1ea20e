"""``fault_tolerance=False`` is Lightning's own behaviour; checkpoints load with and without it."""

import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

import lightning_liger
from lightning_liger import (
    FabricLigerModelParallelStrategy,
    FabricLigerStrategy,
    LigerDDPStrategy,
    LigerModelParallelStrategy,
    LigerSingleDeviceStrategy,
    LigerStrategy,
)
from lightning_liger.resuming.atomic_io import AtomicCheckpointIO
from lightning_liger.resuming.dataloader import ResumableDataLoader
from tests.lightning_liger.resuming.workers.faults import Signalled
from tests.lightning_liger.resuming.workers.resume import NUM_BATCHES, NUM_EPOCHS, DropoutLM, fit, num_left
from tests.lightning_liger.strategies.workers.distributed import build_model, make_optimizer

MIDDLE = ("batch", 1, 3)


def off(**options: Any) -> LigerSingleDeviceStrategy:
    return LigerSingleDeviceStrategy(kernels="none", fault_tolerance=False, **options)


class Inspects(L.Callback):
    """Keeps the classes of the loaders and the replaced attributes of Lightning's signal connector."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.loaders = (type(trainer.train_dataloader), type(trainer.val_dataloaders))
        self.replaced = "_sigterm_notifier_fn" in vars(trainer._signal_connector)


@pytest.mark.parametrize("on", [True, False])
def test_switch_decides_over_loaders_checkpoints_and_signals(tmp_path, on):
    inspects = Inspects()
    strategy = LigerSingleDeviceStrategy(kernels="none", fault_tolerance=on)
    fit(tmp_path, strategy=strategy, points={"saved": MIDDLE}, callbacks=[inspects])
    assert inspects.loaders == (ResumableDataLoader if on else DataLoader,) * 2
    assert inspects.replaced == on
    assert ("lightning_liger" in torch.load(tmp_path / "saved", weights_only=True)) == on
    assert type(strategy.checkpoint_io) is (AtomicCheckpointIO if on else TorchCheckpointIO)


def test_without_it_training_and_resuming_are_lightnings_own(tmp_path):
    runs = [fit(tmp_path, strategy=off(), points={"ours": MIDDLE}), fit(tmp_path, points={"lightnings": MIDDLE})]
    resumed = [
        fit(tmp_path, seed=90, ckpt_path=tmp_path / path, **options)
        for path in ("ours", "lightnings")
        for options in ({"strategy": off()}, {"strategy": "auto"})
    ]
    for run, other in ((runs[1], runs[0]), *((each, resumed[0]) for each in resumed[1:])):
        torch.testing.assert_close(run._asdict(), other._asdict(), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("saved_with", [True, False])
def test_checkpoints_load_with_and_without_it(tmp_path, saved_with):
    def strategy(on: bool) -> LigerSingleDeviceStrategy:
        return LigerSingleDeviceStrategy(kernels="none", fault_tolerance=on)

    fit(tmp_path, strategy=strategy(saved_with), points={"saved": MIDDLE}, module=DropoutLM(0.0))
    run = fit(tmp_path, strategy=strategy(not saved_with), ckpt_path=tmp_path / "saved", module=DropoutLM(0.0))
    assert len(run.losses) == num_left(MIDDLE)
    assert run.global_step == NUM_EPOCHS * -(-NUM_BATCHES // 2)


def test_without_it_sigterm_has_lightnings_exit_code(tmp_path):
    callbacks = [Signalled(signal.SIGTERM, [0], at=MIDDLE[1:]), ModelCheckpoint(tmp_path, save_on_exception=True)]
    with pytest.raises(SIGTERMException) as error:
        fit(tmp_path, strategy=off(), callbacks=callbacks, enable_checkpointing=True)
    assert error.value.code is None


def test_without_it_checkpoint_io_is_lightnings():
    for strategy in (LigerDDPStrategy, LigerStrategy, LigerModelParallelStrategy):
        plain = strategy(fault_tolerance=False)
        assert type(plain.checkpoint_io) is TorchCheckpointIO
        plain.checkpoint_io = AsyncCheckpointIO()
        assert type(plain.checkpoint_io.checkpoint_io) is TorchCheckpointIO
    for fabrics in (FabricLigerStrategy, FabricLigerModelParallelStrategy):  # which refuse plugins
        with pytest.raises(NotImplementedError, match="CheckpointIO"):
            fabrics(fault_tolerance=False).checkpoint_io = TorchCheckpointIO()


@pytest.mark.parametrize("on", [True, False])
def test_fabric_writes_to_a_temporary_name_only_with_it(tmp_path, monkeypatch, on):
    written: list[str] = []
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda state, file: (written.append(_name(file)), save(state, file)))
    strategy = lightning_liger.FabricLigerSingleDeviceStrategy(kernels="none", fault_tolerance=on)
    fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=1)
    model = fabric.setup_module(build_model())
    optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
    path = tmp_path / "saved.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 1})
    assert fabric.load(path)["step"] == 1
    assert [name.startswith(".incomplete-") for name in written] == [on]


def _name(file: Any) -> str:
    return Path(getattr(file, "name", "")).name
