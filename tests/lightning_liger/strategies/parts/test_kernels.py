"""What all strategies share on one process: when kernels are applied, where logits are lazy, what checkpoints hold."""

import pytest
import torch

from lightning_liger import LazyLogits
from lightning_liger.lazy.logits import loss_wanted
from lightning_liger.strategies.registration import REGISTRATIONS
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    KindsOfLogits,
    build_model,
    logit_counts,
    make_batches,
    make_loader,
    make_trainer,
)
from tests.lightning_liger.strategies.workers.trainings import (
    assert_trained_as,
    fit_with_fabric,
    loss_of_labels,
    loss_of_logits,
    reference_training,
)

NUM_STEPS = 6
NAMES = ["liger", "liger_ddp", "liger_fsdp", "liger_model_parallel"]
CLASSES = {each.name: each for each in REGISTRATIONS}

by_name = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("loss_of", [loss_of_labels, loss_of_logits])
def test_fabric_trains_as_the_stock_model(loss_of):
    run, batches = {"accelerator": "cpu", "size": 1}, make_batches(0, NUM_STEPS)
    found = fit_with_fabric(run, "liger", build_model(), batches, loss_of)
    assert (found["num_replaced"], found["logit_counts"]) == (10, (NUM_STEPS, 0))
    assert_trained_as(reference_training(build_model(), [batches]), [found], "cpu")


@by_name
@pytest.mark.parametrize("kernels", ["auto", "none", ["rope", "linear_cross_entropy"]], ids=str)
def test_kernels_are_applied_once_and_logits_are_lazy_in_every_stage_with_a_loss(tmp_path, name, kernels):
    kind = torch.Tensor if kernels == "none" else LazyLogits
    module = KindsOfLogits()
    trainer = make_trainer(root=tmp_path, strategy=CLASSES[name].trainer(kernels=kernels))
    assert trainer.strategy.patch_report is None
    trainer.fit(module, make_loader(0, 1), make_loader(1, 1))
    report, classes = trainer.strategy.patch_report, [type(part) for part in module.modules()]
    assert report.num_replaced == {"auto": 10, "none": 0}.get(str(kernels), 3)
    trainer.validate(module, make_loader(1, 1), verbose=False)
    trainer.test(module, make_loader(1, 1), verbose=False)
    trainer.predict(module, make_loader(1, 1))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, make_loader(0, 1), make_loader(1, 1))
    assert trainer.global_step == 2
    assert module.kinds == {"train": kind, "val": kind, "test": kind, "predict": torch.Tensor}
    assert not loss_wanted.value
    assert kernels == "none" or trainer.strategy.patch_report is report
    assert [type(part) for part in module.modules()] == classes


@by_name
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_kernels_are_applied_in_whatever_stage_comes_first_and_to_a_second_model(tmp_path, name, stage):
    trainer = make_trainer(root=tmp_path, strategy=name)
    getattr(trainer, stage)(KindsOfLogits(), make_loader(0, 1))
    report, second = trainer.strategy.patch_report, LM()
    trainer.fit(second, make_loader(0, 1))
    assert logit_counts(trainer.strategy.model) == (1, 0)
    assert report.num_replaced == trainer.strategy.patch_report.num_replaced == 10
    assert trainer.strategy.patch_report is not report
