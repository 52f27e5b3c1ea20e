"""Buffers of Hugging Face models in half precision are those of ``from_pretrained``, under every engine."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_liger.strategies.parts.buffers import convert_as_pretrained
from lightning_liger.weights.meta_device import initialize
from tests.lightning_liger.architectures import tiny_causal_lm
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    build_model,
    launched_fabric,
    make_loader,
    make_trainer,
)
from tests.lightning_liger.tiny import tiny_llama

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
ARCHITECTURES = ["llama", "gemma3_text", "falcon_mamba", "glm4_moe_lite", "deepseek_v3", "ctrl", "gptj", "xglm", "zaya"]
"""Angles, scales, biases of routers, masks, tables of positions; some would turn hidden states to float32."""
PRECISIONS = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
FREQUENCIES = build_model().model.rotary_emb.inv_freq


def make(name):
    return tiny_llama(rope_parameters=YARN) if name == "llama" else tiny_causal_lm(name)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_buffers_are_those_of_from_pretrained_however_the_model_was_made(tmp_path, name, precision, device):
    model, plugin = make(name), HalfPrecision(precision)
    model.save_pretrained(tmp_path)
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=PRECISIONS[precision]).named_buffers())
    with plugin.module_init_context(), torch.device(device):  # as in configure_model
        made_in_it = type(model)(copy.deepcopy(model.config))
    for each in (model, made_in_it):
        convert_as_pretrained(plugin, convert_as_pretrained(plugin, each))  # again for each stage
        found = dict(each.named_buffers())
        assert {key: found[key].dtype for key in found} == {key: expected[key].dtype for key in expected}
        assert next(each.parameters()).dtype == PRECISIONS[precision]
    if name == "llama":
        initialize(made_in_it, torch.device("cpu"))
        for each in (model, made_in_it):
            assert all(torch.equal(buffer, expected[key]) for key, buffer in each.named_buffers())


def test_float32_and_other_modules_are_converted_as_lightning_does():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.inv_freq = nn.Buffer(torch.rand(4))
            self.norm = nn.BatchNorm1d(4)

    plain = convert_as_pretrained(HalfPrecision("bf16-true"), Plain())
    assert {tensor.dtype for tensor in plain.state_dict().values()} == {torch.bfloat16, torch.int64}
    model = make("llama")
    before = dict(model.named_buffers())
    convert_as_pretrained(L.pytorch.plugins.Precision(), model)
    assert all(before[name] is buffer for name, buffer in model.named_buffers())


# Engines, one process; DeepSpeed's are in test_deepspeed.py


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", ["liger", "liger_ddp", "liger_fsdp", "liger_model_parallel"])
def test_engines_compute_with_frequencies_in_float32(tmp_path, strategy, precision):
    module = LM()
    make_trainer(root=tmp_path, strategy=strategy, precision=precision).fit(module, make_loader(0, 1))
    model = build_model()
    fabric = launched_fabric(strategy, precision=precision)
    fabric.backward(fabric.setup_module(model)(input_ids=torch.ones(1, 3, dtype=torch.int64)).logits.sum())
    for used in (module.model.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq):
        assert used.dtype == torch.float32
        assert torch.equal(used, FREQUENCIES)
    assert next(model.parameters()).dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
