"""``fault_tolerance=False`` is Lightning's own behavior; checkpoints load with and without it."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader

from lightning_liger import FabricLigerModelParallelStrategy, FabricLigerStrategy, LigerSingleDeviceStrategy
from lightning_liger.resuming.atomic_io import AtomicCheckpointIO
from lightning_liger.resuming.dataloader import ResumableDataLoader
from tests.lightning_liger.resuming.workers.resume import NUM_BATCHES, NUM_EPOCHS, DropoutLM, fit, num_left

MIDDLE = ("batch", 1, 3)


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


@pytest.mark.parametrize("saved_with", [True, False])
def test_checkpoints_load_with_and_without_it(tmp_path, saved_with):
    def strategy(on: bool) -> LigerSingleDeviceStrategy:
        return LigerSingleDeviceStrategy(kernels="none", fault_tolerance=on)

    fit(tmp_path, strategy=strategy(saved_with), points={"saved": MIDDLE}, module=DropoutLM(0.0))
    run = fit(tmp_path, strategy=strategy(not saved_with), ckpt_path=tmp_path / "saved", module=DropoutLM(0.0))
    assert len(run.losses) == num_left(MIDDLE)
    assert run.global_step == NUM_EPOCHS * -(-NUM_BATCHES // 2)


@pytest.mark.parametrize("strategy", [FabricLigerStrategy, FabricLigerModelParallelStrategy])
def test_without_it_strategies_refuse_plugins_as_lightnings_do(strategy):
    with pytest.raises(NotImplementedError, match="CheckpointIO"):
        strategy(fault_tolerance=False).checkpoint_io = TorchCheckpointIO()
