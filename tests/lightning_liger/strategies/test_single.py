"""``liger`` takes the one device that Trainer or Fabric has, and no more than one."""

import lightning as L
import pytest
import torch

from lightning_liger import FabricLigerSingleDeviceStrategy, LigerSingleDeviceStrategy
from tests.lightning_liger.strategies.workers.distributed import LM, Losses, logit_counts, make_loader, make_trainer

ENGINES = {
    "trainer": (lambda **options: L.Trainer(logger=False, **options), LigerSingleDeviceStrategy),
    "fabric": (L.Fabric, FabricLigerSingleDeviceStrategy),
}

in_both = pytest.mark.parametrize(("engine", "strategy"), ENGINES.values(), ids=ENGINES)


@in_both
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_strategy_is_taken_by_name_and_gets_the_device(engine, strategy, accelerator):
    last = torch.cuda.device_count() - 1
    made = engine(strategy="liger", accelerator=accelerator, devices=1 if accelerator == "cpu" else [last]).strategy
    assert type(made) is strategy
    assert made.root_device == (torch.device("cpu") if accelerator == "cpu" else torch.device("cuda", last))
    assert made.world_size == 1


@in_both
@pytest.mark.parametrize("by_name", [True, False], ids=["name", "object"])
def test_several_devices_are_refused_with_what_to_use_instead(engine, strategy, by_name):
    with pytest.raises(ValueError, match="one device, got 2") as refused:
        engine(strategy="liger" if by_name else strategy(), accelerator="cpu", devices=2)
    assert all(part in str(refused.value) for part in ("devices=1", "liger_fsdp", "liger_ddp"))


@in_both
def test_device_that_the_user_gave_is_kept_unless_it_contradicts_the_accelerator(engine, strategy):
    made = engine(strategy=strategy(device="cpu")).strategy
    assert made.root_device == torch.device("cpu")
    assert made.parallel_devices == [torch.device("cpu")]
    with pytest.raises(Exception, match="choose one device type"):
        engine(strategy=strategy(device="cuda:0"), accelerator="cpu")


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", "bf16-true"])
def test_device_trains_fused_in_every_precision(tmp_path, accelerator, precision):
    recorder, module = Losses(), LM()
    options = {"strategy": "liger", "accelerator": accelerator, "devices": 1, "precision": precision}
    make_trainer(recorder, root=tmp_path, **options).fit(module, make_loader(0))
    assert logit_counts(module) == (len(recorder.losses), 0)
    assert recorder.losses[-1] < recorder.losses[0] - 0.5


@pytest.mark.parametrize("strategy", ["liger", {"class_path": "lightning_liger.LigerSingleDeviceStrategy"}], ids=str)
def test_devices_auto_of_the_command_line_is_one_device(made_by_yaml, strategy):
    made = made_by_yaml(strategy, devices="auto", accelerator="auto")
    assert type(made) is LigerSingleDeviceStrategy
    assert made.world_size == 1
