"""What ``liger`` and ``liger_ddp`` share: when kernels are applied, and where logits are lazy."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_liger import (
    FabricLigerDDPStrategy,
    FabricLigerSingleDeviceStrategy,
    LazyLogits,
    LigerDDPStrategy,
    LigerSingleDeviceStrategy,
)
from lightning_liger.lazy.logits import is_loss_wanted
from lightning_liger.patching import KERNELS
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    KindsOfLogits,
    Losses,
    build_model,
    logit_counts,
    make_batches,
    make_loader,
    make_optimizer,
    make_trainer,
    outside_loss,
)

NUM_STEPS = 6
STOCK = {"liger": "auto", "liger_ddp": "ddp"}
"""The names, with Lightning's strategy in the place of each."""
TRAINER = {"liger": LigerSingleDeviceStrategy, "liger_ddp": LigerDDPStrategy}
FABRIC = {"liger": FabricLigerSingleDeviceStrategy, "liger_ddp": FabricLigerDDPStrategy}

by_name = pytest.mark.parametrize("name", STOCK)


def train(root, strategy, module, **options):
    """The losses of a few steps, with the strategy."""
    recorder = Losses()
    trainer = make_trainer(recorder, root=root, strategy=strategy, **options)
    trainer.fit(module, make_loader(0, NUM_STEPS))
    return recorder.losses, trainer.strategy


def patched(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.startswith("Liger")]


@by_name
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_trainer_trains_as_with_lightnings_strategy_and_the_stock_model(tmp_path, name, tied):
    module, stock = LM(tied), LM(tied)
    losses, strategy = train(tmp_path, name, module)
    stock_losses, _ = train(tmp_path, STOCK[name], stock)
    assert patched(stock) == []
    assert strategy.patch_report.num_replaced == 10
    assert logit_counts(module) == (NUM_STEPS, 0)
    torch.testing.assert_close(losses, stock_losses, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(module.state_dict(), stock.state_dict(), rtol=1e-5, atol=1e-5)


@by_name
@pytest.mark.parametrize("of_labels", [True, False], ids=["labels", "logits"])
def test_fabric_trains_as_with_lightnings_strategy_and_the_stock_model(name, of_labels):
    def train(strategy):
        fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=1)
        fabric.launch()
        inner = build_model()
        model, optimizer = fabric.setup(inner, make_optimizer(inner.parameters()))
        losses = []
        for batch in make_batches(0, NUM_STEPS):
            inputs = batch if of_labels else {"input_ids": batch["input_ids"]}
            output = model(**inputs)
            loss = output.loss if of_labels else outside_loss(output.logits, batch["labels"])
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses, inner

    losses, model = train(name)
    stock_losses, stock = train(STOCK[name])
    assert len(patched(model)) == 10
    assert patched(stock) == []
    assert logit_counts(model) == (NUM_STEPS, 0)
    torch.testing.assert_close(losses, stock_losses, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(model.state_dict(), stock.state_dict(), rtol=1e-5, atol=1e-5)


@by_name
@pytest.mark.parametrize(("kernels", "kind"), [("auto", LazyLogits), ("none", torch.Tensor)])
def test_logits_are_lazy_in_every_stage_with_a_loss_and_whole_in_predict(tmp_path, name, kernels, kind):
    module = KindsOfLogits()
    trainer = make_trainer(root=tmp_path, strategy=TRAINER[name](kernels=kernels))
    trainer.fit(module, make_loader(0, 1), make_loader(1, 1))
    trainer.test(module, make_loader(1, 1), verbose=False)
    trainer.predict(module, make_loader(1, 1))
    assert module.kinds == {"train": kind, "val": kind, "test": kind, "predict": torch.Tensor}
    assert not is_loss_wanted()


@by_name
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_kernels_are_applied_in_whatever_stage_comes_first(tmp_path, name, stage):
    module = KindsOfLogits()
    trainer = make_trainer(root=tmp_path, strategy=name)
    assert trainer.strategy.patch_report is None
    getattr(trainer, stage)(module, make_loader(0, 1))
    assert trainer.strategy.patch_report.num_replaced == len(patched(module)) == 10


@by_name
@pytest.mark.parametrize("kernels", ["auto", ["rope", "linear_cross_entropy"], {"silu_mul": True}], ids=str)
def test_kernels_are_applied_once_in_all_stages_of_a_trainer(tmp_path, name, kernels):
    module = KindsOfLogits()
    trainer = make_trainer(root=tmp_path, strategy=TRAINER[name](kernels=kernels))
    trainer.fit(module, make_loader(0, 1), make_loader(1, 1))
    report, kinds = trainer.strategy.patch_report, [type(part) for part in module.modules()]
    trainer.validate(module, make_loader(1, 1), verbose=False)
    trainer.test(module, make_loader(1, 1), verbose=False)
    trainer.predict(module, make_loader(1, 1))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, make_loader(0, 1), make_loader(1, 1))
    assert trainer.global_step == 2
    assert trainer.strategy.patch_report is report
    assert [type(part) for part in module.modules()] == kinds


@by_name
def test_second_model_of_a_trainer_is_patched_too(tmp_path, name):
    trainer = make_trainer(root=tmp_path, strategy=name)
    first, second = LM(), LM()
    trainer.fit(first, make_loader(0, 1))
    report = trainer.strategy.patch_report
    trainer.validate(second, make_loader(0, 1), verbose=False)
    assert len(patched(second)) == trainer.strategy.patch_report.num_replaced == 10
    assert trainer.strategy.patch_report is not report


@by_name
def test_checkpoint_loads_into_the_stock_model_and_resumes(tmp_path, name):
    trainer = make_trainer(root=tmp_path, strategy=name)
    trainer.fit(LM(), make_loader(0, 2))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    saved = torch.load(tmp_path / "model.ckpt", weights_only=False)["state_dict"]
    build_model().load_state_dict({key.removeprefix("model."): value for key, value in saved.items()})
    resumed, uninterrupted = Losses(), Losses()
    fit = {"root": tmp_path, "strategy": name, "max_epochs": 2}
    make_trainer(resumed, **fit).fit(LM(), make_loader(0, 2), ckpt_path=tmp_path / "model.ckpt")
    make_trainer(uninterrupted, **fit).fit(LM(), make_loader(0, 2))
    assert resumed.losses == pytest.approx(uninterrupted.losses[2:], rel=1e-6)


@by_name
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_lower_precisions_train_fused(tmp_path, name, precision):
    module = LM()
    losses, _ = train(tmp_path, name, module, precision=precision)
    assert logit_counts(module) == (NUM_STEPS, 0)
    assert losses[-1] < losses[0] - 0.3


@by_name
def test_failing_validation_step_ends_lazy_logits(tmp_path, name):
    class Failing(LM):
        def validation_step(self, batch, batch_idx):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        make_trainer(root=tmp_path, strategy=name).fit(Failing(), make_loader(0, 1), make_loader(1, 1))
    assert not is_loss_wanted()


@by_name
@pytest.mark.parametrize("strategies", [TRAINER, FABRIC], ids=["trainer", "fabric"])
@pytest.mark.parametrize("kernels", [["foo"], ["rope", "foo"], "foo", {"foo": True}], ids=str)
def test_unknown_kernel_is_refused_at_once_with_the_known_ones(name, strategies, kernels):
    with pytest.raises(ValueError, match=r"unknown .*'foo'") as refused:
        strategies[name](kernels=kernels)
    assert all(known in str(refused.value) for known in KERNELS)


@by_name
@pytest.mark.parametrize(("kernels", "replaced"), [("auto", 10), (["silu_mul"], 2), ("none", 0)])
def test_patch_report_is_there_once_fabric_has_set_the_model_up(name, kernels, replaced):
    strategy = FABRIC[name](kernels=kernels)
    assert strategy.patch_report is None
    fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    model = fabric.setup_module(build_model())
    assert strategy.patch_report.num_replaced == len(patched(model)) == replaced


@by_name
@pytest.mark.parametrize(
    "kernels",
    ["none", ["rope", "silu_mul"], {"linear_cross_entropy": {"chunk_bytes": 4096}, "rope": False}],
    ids=["name", "list", "dict"],
)
def test_yaml_gives_the_strategy_its_kernels(made_by_yaml, name, kernels):
    options = {"process_group_backend": "gloo", "find_unused_parameters": True} if name == "liger_ddp" else {}
    strategy = {"class_path": f"lightning_liger.{TRAINER[name].__name__}", "init_args": {"kernels": kernels, **options}}
    made = made_by_yaml(strategy)
    assert type(made) is TRAINER[name]
    assert made.kernels == kernels
    assert getattr(made, "process_group_backend", "gloo") == "gloo"
    assert getattr(made, "_ddp_kwargs", {}).get("find_unused_parameters") is (True if options else None)
