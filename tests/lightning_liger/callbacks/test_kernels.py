"""``LigerCallback`` gives strategies that know nothing of kernels the same kernels."""

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_liger import LazyLogits, LigerCallback
from lightning_liger.lazy.logits import loss_wanted
from lightning_liger.strategies.parts import activations
from tests.lightning_liger.activations.simulated import FakeMemory
from tests.lightning_liger.post_training.training import LM as BuiltLM
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    KindsOfLogits,
    Losses,
    logit_counts,
    make_loader,
    make_trainer,
)

NUM_BATCHES = 4


def is_patched(module) -> list[str]:
    return [type(part).__name__ for part in module.modules() if type(part).__name__.startswith("Liger")]


@pytest.mark.parametrize("module_class", [LM, BuiltLM], ids=["configure_model", "built in __init__"])
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_losses_are_fused_and_those_of_the_stock_model(tmp_path, strategy, module_class):
    def fit(*callbacks):
        recorder, module = Losses(), module_class()
        # A strategy object, because DDP by name would need another process group.
        chosen = DDPStrategy(process_group_backend="gloo") if strategy == "ddp" else strategy
        make_trainer(recorder, *callbacks, root=tmp_path, strategy=chosen).fit(module, make_loader(0, NUM_BATCHES))
        return recorder.losses, module

    callback = LigerCallback()
    losses, module = fit(callback)
    stock_losses, stock = fit()
    torch.testing.assert_close(losses, stock_losses, rtol=1e-6, atol=0.0)
    assert callback.patch_report.num_replaced == 10
    assert logit_counts(module) == (NUM_BATCHES, 0)
    assert is_patched(stock) == []


def test_activations_are_controlled_and_a_budget_is_planned_at_optimizer_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "memory_of", lambda device: FakeMemory(2**30))

    def fit(**options):
        callback, recorder, seen = LigerCallback(**options), Losses(), []

        class Modes(L.Callback):
            def on_before_zero_grad(self, *_):
                (controlled,) = callback._activations.controlled
                seen.append(list(controlled.modes))

        trainer = make_trainer(recorder, callback, Modes(), root=tmp_path, strategy="auto", accumulate_grad_batches=2)
        trainer.fit(LM(), make_loader(0, 8))
        return recorder.losses, seen

    expected, seen = fit()
    assert seen == [["cheap"] * 2] * 4
    losses, seen = fit(activation_checkpointing=1)
    assert losses == expected
    assert seen == [["recompute", "cheap"]] * 4
    losses, seen = fit(memory_budget=0.5)
    assert losses == expected
    assert seen == [["recompute"] * 2] * 2 + [["store"] * 2] * 2


def test_named_kernels_are_the_only_ones_applied_and_reported_after_later_stages(tmp_path):
    module, callback = LM(), LigerCallback(kernels=["silu_mul"])
    trainer = make_trainer(callback, root=tmp_path)
    trainer.fit(module, make_loader(0, 1))
    assert is_patched(module) == ["LigerLlamaMLP"] * 2
    first = callback.patch_report
    assert first.num_replaced == 2
    trainer.validate(module, make_loader(1, 1), verbose=False)
    assert callback.patch_report is first
    assert "configure_model" not in vars(module)


def test_logits_are_lazy_in_every_stage_with_a_loss_and_whole_in_predict_and_after_an_error(tmp_path):
    module = KindsOfLogits()
    trainer = make_trainer(LigerCallback(), root=tmp_path)
    trainer.fit(module, make_loader(0, 1), make_loader(1, 1))
    trainer.test(module, make_loader(1, 1), verbose=False)
    trainer.predict(module, make_loader(1, 1))
    assert module.kinds == {"train": LazyLogits, "val": LazyLogits, "test": LazyLogits, "predict": torch.Tensor}
    assert not loss_wanted.value
    with pytest.raises(KeyError, match="labels"):
        trainer.test(module, DataLoader([{"input_ids": torch.zeros(1, 3).long()}], batch_size=None))
    assert not loss_wanted.value
