"""Buffers of Hugging Face models in half precision are those of ``from_pretrained``, under every engine."""

import copy
from functools import partial

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.precision import HalfPrecision as FabricHalfPrecision
from lightning.fabric.plugins.precision.deepspeed import DeepSpeedPrecision as FabricDeepSpeedPrecision
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision as FabricFSDPPrecision
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lightning_liger.strategies.precision import ClippedPrecision, KernelConversion, ShardedPrecision, adopt
from lightning_liger.weights.materialize import materialize
from tests.lightning_liger.architectures import tiny_causal_lm
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    build_model,
    make_batches,
    make_loader,
    make_trainer,
)
from tests.lightning_liger.tiny import tiny_llama

PLUGINS = {
    "trainer": (HalfPrecision, ClippedPrecision),
    "fabric": (FabricHalfPrecision, KernelConversion),
    "trainer_fsdp": (FSDPPrecision, ClippedPrecision),
    "fabric_fsdp": (FabricFSDPPrecision, ShardedPrecision),
    "trainer_deepspeed": (DeepSpeedPrecision, KernelConversion),
    "fabric_deepspeed": (FabricDeepSpeedPrecision, KernelConversion),
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "llama": partial(tiny_llama, rope_parameters=YARN),
    # Buffers that ask for no dtype: a scale, a weight that would turn the hidden states to float32.
    "gemma3_text": partial(tiny_causal_lm, "gemma3_text"),
    "falcon_mamba": partial(tiny_causal_lm, "falcon_mamba"),
    # Persistent buffers that ask for float32, and one that is loaded in it.
    "glm4_moe_lite": partial(tiny_causal_lm, "glm4_moe_lite"),
    "deepseek_v3": partial(tiny_causal_lm, "deepseek_v3"),
    # A table of angles.
    "ctrl": partial(tiny_causal_lm, "ctrl"),
}
PRECISIONS = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


def adopted(plugin, precision="bf16-true"):
    plugin_class, mixin = PLUGINS[plugin]
    made = plugin_class(precision)
    adopt(made, mixin, kernels="auto")
    return made


def made_again(plugin, model, device):
    """A model of the same configuration as the plugin's ``configure_model`` makes it."""
    with plugin.module_init_context(), torch.device(device):
        return type(model)(copy.deepcopy(model.config))


def assert_same_buffers(model, expected):
    buffers, wanted = (dict(each.named_buffers()) for each in (model, expected))
    assert {name: buffer.dtype for name, buffer in buffers.items()} == {
        name: buffer.dtype for name, buffer in wanted.items()
    }
    assert all(torch.equal(buffer, wanted[name]) for name, buffer in buffers.items())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What ``from_pretrained`` makes of a model in a dtype."""
    folders = {}

    def load(name, dtype):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            MODELS[name]().save_pretrained(folders[name])
        return AutoModelForCausalLM.from_pretrained(folders[name], dtype=dtype)

    return load


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_buffers_of_a_model_made_in_float32_are_those_of_from_pretrained(loaded, name, precision):
    model = adopted("trainer", precision).convert_module(MODELS[name]())
    assert_same_buffers(model, loaded(name, PRECISIONS[precision]))
    assert next(model.parameters()).dtype == PRECISIONS[precision]


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("context", [True, False], ids=["in_context", "without_context"])
def test_every_plugin_keeps_them_however_the_model_was_made(loaded, plugin, device, context):
    plugin, model = adopted(plugin), MODELS["llama"]()
    if context:
        model = made_again(plugin, model, device)
    elif device == "meta":
        model = made_again(L.pytorch.plugins.Precision(), model, device)
    model = plugin.convert_module(plugin.convert_module(model))  # again for each stage
    materialize(model, torch.device("cpu"))
    assert_same_buffers(model, loaded("llama", torch.bfloat16))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["falcon_mamba", "glm4_moe_lite", "deepseek_v3"])
def test_buffers_of_a_model_made_in_configure_model_have_the_same_dtypes(loaded, name, device):
    plugin = adopted("trainer")
    model = plugin.convert_module(made_again(plugin, MODELS[name](), device))
    expected = {name: buffer.dtype for name, buffer in loaded(name, torch.bfloat16).named_buffers()}
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == expected


def test_float32_and_other_modules_are_converted_as_lightning_does(loaded):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.inv_freq = nn.Buffer(torch.rand(4))
            self.norm = nn.BatchNorm1d(4)

    plain = adopted("trainer").convert_module(Plain())
    assert {tensor.dtype for tensor in plain.state_dict().values()} == {torch.bfloat16, torch.int64}
    model = MODELS["llama"]()
    before = dict(model.named_buffers())
    after = dict(adopted("trainer_fsdp", "bf16-mixed").convert_module(model).named_buffers())
    assert all(after[name] is buffer for name, buffer in before.items())


def test_user_is_told_where_the_dtypes_cannot_be_known():
    class Own(LlamaForCausalLM):
        def __init__(self, config, extra):
            super().__init__(config)

    model = Own(tiny_llama().config, 1)
    with pytest.warns(UserWarning, match=r"Own: its buffers were cast to torch.bfloat16 .*'extra'.*in configure_model"):
        adopted("trainer").convert_module(model)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "bf16-mixed"])
def test_fsdp_casts_buffers_in_mixed_precision_only(precision):
    config = adopted("fabric_fsdp", precision).mixed_precision_config
    assert config.buffer_dtype == (torch.bfloat16 if precision == "bf16-mixed" else None)


# Engines, one process; DeepSpeed's are in test_deepspeed.py

ENGINES = ["liger", "liger_ddp", "liger_fsdp", "liger_model_parallel"]
FREQUENCIES = build_model().model.rotary_emb.inv_freq


class Watching(LM):
    """Notes the frequencies in each forward."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.used = self.model.model.rotary_emb.inv_freq.clone()
        return loss


@pytest.mark.parametrize("strategy", ENGINES)
def test_trainer_computes_with_frequencies_in_float32(tmp_path, strategy):
    module = Watching()
    trainer = make_trainer(root=tmp_path, strategy=strategy, precision="bf16-true")
    trainer.fit(module, make_loader(0, 1))
    assert module.used.dtype == torch.float32
    assert torch.equal(module.used, FREQUENCIES)


@pytest.mark.parametrize("strategy", ENGINES)
def test_fabric_computes_with_frequencies_in_float32(strategy):
    model = build_model()
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy, precision="bf16-true")
    fabric.launch()
    fabric.backward(fabric.setup_module(model)(**make_batches(0)[0]).loss)
    assert torch.equal(model.model.rotary_emb.inv_freq, FREQUENCIES)
    assert next(model.parameters()).dtype == torch.bfloat16
