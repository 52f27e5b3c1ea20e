"""Precision plugins: ours apply kernels and keep losses lazy; a strategy extends those of others only to clip."""

import copy
import pickle

import pytest
import torch
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision as FabricFSDPPrecision
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from lightning_liger import (
    FabricLigerPrecisionPlugin,
    LazyLogits,
    LigerDDPStrategy,
    LigerFSDPStrategy,
    LigerPrecisionPlugin,
    LigerSingleDeviceStrategy,
)
from lightning_liger.strategies.precision import GradientClipping, control_gradients
from tests.lightning_liger.strategies.workers.distributed import LM, build_model, make_loader, make_trainer

PLUGINS = [
    pytest.param(LigerPrecisionPlugin, FSDPPrecision, id="trainer"),
    pytest.param(FabricLigerPrecisionPlugin, FabricFSDPPrecision, id="fabric"),
]
INPUT_IDS = torch.arange(6).view(1, 6)


class Own(Precision):
    """Clips in its own way."""

    def clip_grad_by_norm(self, optimizer, clip_val):
        return "own"


# Ours


@pytest.mark.parametrize(("plugin_class", "base"), PLUGINS)
@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)]
)
def test_module_is_cast_and_then_patched_once(plugin_class, base, precision, dtype):
    plugin = plugin_class(precision)
    assert plugin.patch_report is None
    model = plugin.convert_module(build_model())
    plugin.convert_module(model)  # as when fit is followed by test
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert plugin.patch_report.num_replaced == 10
    assert isinstance(model(INPUT_IDS).logits, LazyLogits)
    expected = base(precision).mixed_precision_config
    assert plugin.mixed_precision_config.param_dtype == expected.param_dtype
    assert plugin.mixed_precision_config.buffer_dtype is None  # FSDP would cast buffers again


@pytest.mark.parametrize(("plugin_class", "base"), PLUGINS)
def test_scaler_of_the_user_is_taken(plugin_class, base):
    scaler = ShardedGradScaler(init_scale=8.0)
    assert plugin_class("16-mixed", scaler).scaler is scaler


def test_head_is_lazy_without_gradients_where_a_loss_follows():
    plugin = LigerPrecisionPlugin("32-true")
    model = plugin.convert_module(build_model())
    with torch.no_grad():
        for context, kind in (("val", LazyLogits), ("test", LazyLogits), ("predict", torch.Tensor)):
            with getattr(plugin, f"{context}_step_context")():
                assert type(model(INPUT_IDS).logits) is kind
            assert type(model(INPUT_IDS).logits) is torch.Tensor
        with pytest.raises(RuntimeError, match="boom"), plugin.val_step_context():
            raise RuntimeError("boom")
        assert type(model(INPUT_IDS).logits) is torch.Tensor


# Those of others, under our strategies


@pytest.mark.parametrize("strategy", [LigerSingleDeviceStrategy, LigerDDPStrategy])
def test_plugin_converts_once_for_each_stage_and_keeps_its_class(tmp_path, strategy):
    class Quantizing(Own, HalfPrecision):
        num_conversions = 0

        def convert_module(self, module):
            assert not any(type(part).__name__.startswith("Liger") for part in module.modules())
            self.num_conversions += 1
            return super().convert_module(module)

    plugin, module = Quantizing("bf16-true"), LM()
    trainer = make_trainer(root=tmp_path, strategy=strategy(), plugins=[plugin])
    trainer.fit(module, make_loader(0, 1))
    assert plugin.num_conversions == 1
    assert type(plugin) is Quantizing
    assert "convert_module" not in vars(plugin)
    assert plugin.clip_grad_by_norm(None, 1.0) == "own"
    assert trainer.strategy.patch_report.num_replaced == 10
    assert {parameter.dtype for parameter in module.model.parameters()} == {torch.bfloat16}


def test_plugin_of_the_user_chooses_kernels_and_what_to_do_with_gradients_but_no_plan(tmp_path):
    plugin = LigerPrecisionPlugin(kernels=["rope"], on_nonfinite_grad="skip")
    trainer = make_trainer(root=tmp_path, strategy=LigerFSDPStrategy(activation_checkpointing=1), plugins=[plugin])
    trainer.fit(LM(), make_loader(0, 1))
    assert [layers.modes for layers in trainer.strategy._activations.controlled] == [["recompute", "cheap"]]
    assert trainer.strategy.patch_report is plugin.patch_report
    assert plugin.patch_report.num_replaced == 2
    assert plugin.on_nonfinite_grad == "skip"


@pytest.mark.parametrize(
    ("plugin", "on_nonfinite_grad", "message"),
    [
        (Own(), "skip", r"on_nonfinite_grad='skip' needs a precision plugin .* got Own, which"),
        (FSDPPrecision("16-mixed"), "raise", "on_nonfinite_grad='raise' would end training with precision='16-mixed'"),
    ],
)
def test_plugin_that_cannot_follow_the_strategy_is_refused(plugin, on_nonfinite_grad, message):
    with pytest.raises(ValueError, match=message):
        control_gradients(plugin, on_nonfinite_grad)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
@pytest.mark.parametrize(
    ("strategy", "plugin"), [(LigerDDPStrategy, Precision()), (LigerFSDPStrategy, FSDPPrecision("16-mixed"))]
)
def test_strategy_with_a_plugin_that_it_extended_can_be_copied(strategy, plugin, duplicate):
    made = strategy(precision_plugin=plugin, kernels=["rope"], activation_checkpointing=["LlamaMLP"])
    made._control_plugin(plugin)
    copied = duplicate(made)
    assert type(copied.precision_plugin) is type(plugin)
    assert isinstance(plugin, GradientClipping)
    assert (copied.kernels, copied._activations.checkpointing) == (["rope"], ["LlamaMLP"])
    made._control_plugin(plugin)
    assert type(copied.precision_plugin) is type(plugin)  # the class is made once
