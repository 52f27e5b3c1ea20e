"""Layers of every architecture of ``AutoModelForCausalLM`` in every mode."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_liger import apply_liger_kernels
from lightning_liger.activations.layers import release_layers
from tests.lightning_liger.activations.programs import MODES, controlled
from tests.lightning_liger.architectures import (
    CAUSAL_LM_TYPES,
    NOT_TRAINED_BY_ALL_VERSIONS,
    UNBUILDABLE,
    tiny_causal_lm,
    tiny_inputs,
)

RISKY = {
    "bart": "an encoder's states as input",
    "gemma3n_text": "layers that share keys and values",
    "gemma4_text": "the same, and experts",
    "gpt_neo": "layers that do not know their index in the cache",
    "hrm_text": "layers called several times",
    "mamba2": "states instead of keys and values",
    "mixtral": "routers whose logits are an output",
    "nemotron_h": "layers of several kinds",
    "recurrent_gemma": "recurrent layers",
    "reformer": "two streams",
    "xlm": "a list for each part of a layer",
    "zamba2": "a layer that others share",
}
NOT_COMPARED = {
    "blt": "its configuration has no number of layers",
    "reformer": "its hashes are random",
    "xlstm": "its sizes do not fit each other",
}
"""Types that cannot be compared on GPUs, and why."""


def set_dropout_and_caches(model: PreTrainedModel, use_cache: bool) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
        config = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = use_cache


def train(model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss and all gradients."""
    model.zero_grad()
    torch.manual_seed(0)
    output = model(**inputs)
    if "labels" in inputs:
        loss = output.loss
    else:
        loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_in_every_mode(model: PreTrainedModel, inputs: dict[str, Any], rtol: float) -> None:
    """Gradients of at most a thousandth of the largest one are rounding errors, as those of biases of keys."""
    loss, gradients = train(model, inputs)
    expected = {name: None if gradient is None else gradient.clone() for name, gradient in gradients.items()}
    largest = max(each.abs().max().item() for each in expected.values() if each is not None and each.numel())
    for first, second in [*((mode, mode) for mode in MODES), ("recompute", "cheap"), ("cheap", "offload")]:
        control = controlled(model, first)
        control.modes[1::2] = [second] * len(control.modes[1::2])
        found_loss, found = train(model, inputs)
        torch.testing.assert_close(found_loss, loss, rtol=rtol, atol=0)
        for name, want in expected.items():
            scale = 0 if want is None or not want.numel() else max(want.abs().max().item(), 1e-3 * largest)
            torch.testing.assert_close({name: found[name]}, {name: want}, rtol=0, atol=rtol * scale)
    release_layers(model)


@pytest.mark.parametrize("model_type", RISKY)
@pytest.mark.filterwarnings("ignore:lightning-liger. layers that extend the keys")
def test_risky_kinds_give_the_same_in_every_mode(model_type: str) -> None:
    model = tiny_causal_lm(model_type).train()
    if model_type != "reformer":  # whose hashes dropout would change
        set_dropout_and_caches(model, use_cache=True)
    assert_same_in_every_mode(model, tiny_inputs(model), rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", [*CAUSAL_LM_TYPES] if torch.cuda.is_available() else [])
@pytest.mark.filterwarnings("ignore:lightning-liger. layers that extend the keys")
def test_every_architecture_gives_the_same_in_every_mode(model_type: str, dtype: torch.dtype) -> None:
    if model_type in NOT_COMPARED or model_type in UNBUILDABLE:
        pytest.skip(NOT_COMPARED.get(model_type, "cannot be built"))
    try:
        model = tiny_causal_lm(model_type).train().to("cuda", dtype)
        set_dropout_and_caches(model, use_cache=False)  # its other layout would change rounding, and routers' choices
        inputs = {
            name: value.to("cuda", dtype if value.is_floating_point() else None) if isinstance(value, Tensor) else value
            for name, value in tiny_inputs(model).items()
        }
        train(model, inputs)
    except Exception as error:
        if model_type not in NOT_TRAINED_BY_ALL_VERSIONS:
            raise
        pytest.skip(f"the stock model does not train: {type(error).__name__}: {error}")
    apply_liger_kernels(model)
    assert_same_in_every_mode(model, inputs, rtol=1e-3 if dtype == torch.float32 else 0.1)
