"""The precision plugin applies kernels after the dtype conversion, and keeps losses lazy in evaluation."""

import copy
import dataclasses
import pickle
from functools import partial

import pytest
import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision as FabricFSDPPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from lightning_liger import (
    FabricLigerDDPStrategy,
    FabricLigerPrecisionPlugin,
    FabricLigerStrategy,
    LazyLogits,
    LigerDDPStrategy,
    LigerPrecisionPlugin,
    LigerStrategy,
)
from lightning_liger.patching import KERNELS
from lightning_liger.strategies.precision import ClippedPrecision, ShardedClippedPrecision, adopt
from tests.lightning_liger.strategies.workers.distributed import build_model

PLUGINS = [
    pytest.param(LigerPrecisionPlugin, FSDPPrecision, id="trainer"),
    pytest.param(FabricLigerPrecisionPlugin, FabricFSDPPrecision, id="fabric"),
]
INPUT_IDS = torch.arange(6).view(1, 6)


@pytest.mark.parametrize(("plugin_class", "base"), PLUGINS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"])
def test_plugin_of_lightning_is_adopted_with_its_settings(plugin_class, base, precision):
    plugin, untouched = base(precision), base(precision)
    scaler = plugin.scaler
    adopt(plugin, plugin_class.__bases__[0], kernels=["rms_norm"])
    assert type(plugin) is plugin_class
    assert plugin.precision == precision
    assert plugin.kernels == ["rms_norm"]
    assert plugin.scaler is scaler
    assert (plugin.scaler is None) == (precision != "16-mixed")
    config = untouched.mixed_precision_config
    if "true" in precision and precision != "32-true":
        config = dataclasses.replace(config, buffer_dtype=None)  # convert_module gives buffers their dtypes
    assert plugin.mixed_precision_config == config


@pytest.mark.parametrize(("plugin_class", "base"), PLUGINS)
def test_users_gradient_scaler_survives_the_adoption(plugin_class, base):
    given, scaler = base("16-mixed"), ShardedGradScaler(init_scale=8.0)
    given.scaler = scaler  # Lightning 2.6 refuses it as an argument
    adopt(given, plugin_class.__bases__[0], kernels="auto")
    assert given.scaler is scaler
    assert plugin_class("16-mixed", scaler).scaler is scaler


@pytest.mark.parametrize(("plugin_class", "base"), PLUGINS)
def test_plugin_that_its_user_made_keeps_its_kernels(plugin_class, base):
    plugin = plugin_class("32-true", kernels=["rope"])
    adopt(plugin, plugin_class.__bases__[0], kernels="auto")
    assert plugin.kernels == ["rope"]


def test_adopted_plugin_follows_the_next_strategy_that_adopts_it():
    plugin = Precision()
    adopt(plugin, ClippedPrecision, kernels=["rope"], on_nonfinite_grad="skip")
    once = type(plugin)
    adopt(plugin, ClippedPrecision, kernels="none", on_nonfinite_grad="ignore")
    assert type(plugin) is once
    assert (plugin.kernels, plugin.on_nonfinite_grad) == ("none", "ignore")
    assert type(Precision()) is Precision


def test_plugin_that_clips_by_itself_gets_kernels_and_keeps_its_way():
    class Own(Precision):
        def clip_grad_by_norm(self, optimizer, clip_val):
            return "own"

    plugin = Own()
    adopt(plugin, ClippedPrecision, kernels="auto", on_nonfinite_grad="ignore")
    assert plugin.clip_grad_by_norm(None, 1.0) == "own"
    assert isinstance(plugin.convert_module(build_model())(INPUT_IDS).logits, LazyLogits)
    with pytest.raises(ValueError, match="on_nonfinite_grad='skip' needs a precision plugin with Lightning's clip"):
        adopt(Own(), ClippedPrecision, kernels="auto", on_nonfinite_grad="skip")


def test_plugin_of_fsdp_that_clips_by_itself_accumulates_offloaded_gradients_too():
    class Own(FSDPPrecision):
        def clip_grad_by_norm(self, optimizer, clip_val):
            return "own"

    plugin = Own("32-true")
    adopt(plugin, ShardedClippedPrecision, kernels="auto", on_nonfinite_grad="ignore")
    assert plugin.clip_grad_by_norm(None, 1.0) == "own"
    plugin.accumulate_offloaded(build_model())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize(
    ("strategy", "name", "plugin"),
    [
        pytest.param(LigerDDPStrategy, "precision_plugin", Precision, id="ddp"),
        pytest.param(LigerStrategy, "precision_plugin", partial(FSDPPrecision, "32-true"), id="fsdp"),
        pytest.param(FabricLigerDDPStrategy, "precision", FabricPrecision, id="fabric_ddp"),
        pytest.param(FabricLigerStrategy, "precision", partial(FabricFSDPPrecision, "32-true"), id="fabric_fsdp"),
    ],
)
def test_strategy_with_an_adopted_plugin_can_be_pickled(strategy, name, plugin, duplicate):
    """As launchers that spawn processes do."""
    plugin = plugin()
    restored = duplicate(strategy(kernels=["rms_norm"], **{name: plugin}))
    duplicated = getattr(restored, name)
    assert duplicated is not plugin
    assert type(duplicated) is type(plugin)
    assert vars(duplicated).keys() == vars(plugin).keys()
    duplicated.convert_module(build_model())
    assert {entry.kernel for entry in restored.patch_report.entries} == {"rms_norm"}


@pytest.mark.parametrize(("plugin_class", "base"), PLUGINS)
def test_gradient_scaler_is_refused_for_other_precisions(plugin_class, base):
    with pytest.raises(ValueError, match="scaler is for precision '16-mixed' only, got precision='bf16-mixed'"):
        plugin_class("bf16-mixed", ShardedGradScaler())


@pytest.mark.parametrize(("plugin_class", "base"), PLUGINS)
def test_unknown_kernel_is_refused_with_the_known_ones(plugin_class, base):
    with pytest.raises(ValueError, match="'foo'") as refused:
        plugin_class("32-true", kernels=["foo"])
    assert all(name in str(refused.value) for name in KERNELS)


@pytest.mark.parametrize(("plugin_class", "base"), PLUGINS)
def test_unknown_precision_is_refused(plugin_class, base):
    with pytest.raises(ValueError, match="precision='64-true'"):
        plugin_class("64-true")


@pytest.mark.parametrize(("plugin_class", "base"), PLUGINS)
@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)]
)
def test_module_is_cast_and_then_patched(plugin_class, base, precision, dtype):
    plugin = plugin_class(precision)
    assert plugin.patch_report is None
    model = plugin.convert_module(build_model())
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert plugin.patch_report.num_replaced == 10
    assert isinstance(model(INPUT_IDS).logits, LazyLogits)


@pytest.mark.parametrize(("plugin_class", "base"), PLUGINS)
def test_kernels_none_leaves_the_classes_of_the_model(plugin_class, base):
    model = build_model()
    classes = [type(module) for module in model.modules()]
    plugin = plugin_class("32-true", kernels="none")
    plugin.convert_module(model)
    assert [type(module) for module in model.modules()] == classes
    assert plugin.patch_report.num_replaced == 0


def test_report_of_the_first_conversion_stays_when_a_patched_module_is_converted_again():
    plugin = LigerPrecisionPlugin("32-true")
    model = plugin.convert_module(build_model())
    plugin.convert_module(model)  # as when fit is followed by test
    assert plugin.patch_report.num_replaced == 10


@pytest.mark.parametrize(
    ("context", "kind"),
    [
        ("val_step_context", LazyLogits),
        ("test_step_context", LazyLogits),
        ("predict_step_context", torch.Tensor),
    ],
)
def test_head_is_lazy_without_gradients_where_a_loss_follows(context, kind):
    plugin = LigerPrecisionPlugin("32-true")
    model = plugin.convert_module(build_model())
    with torch.no_grad():
        with getattr(plugin, context)():
            assert type(model(INPUT_IDS).logits) is kind
        assert type(model(INPUT_IDS).logits) is torch.Tensor


def test_head_is_not_left_lazy_by_a_failing_step():
    plugin = LigerPrecisionPlugin("32-true")
    model = plugin.convert_module(build_model())
    with pytest.raises(RuntimeError, match="boom"), plugin.val_step_context():
        raise RuntimeError("boom")
    with torch.no_grad():
        assert type(model(INPUT_IDS).logits) is torch.Tensor
