"""Which layers become FSDP units or are recomputed, however they are named."""

import pytest
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from lightning_liger import FabricLigerStrategy, LigerStrategy
from lightning_liger.strategies.parts.policies import check_policy, resolve_policy
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    build_model,
    launched_fabric,
    make_loader,
    make_trainer,
    wrapped_units,
)

LLAMA = "transformers.models.llama.modeling_llama."
LAYERS = {"model.layers.0": "LlamaDecoderLayer", "model.layers.1": "LlamaDecoderLayer"}
MLPS = {"model.layers.0.mlp": "LigerLlamaMLP", "model.layers.1.mlp": "LigerLlamaMLP"}
ATTENTIONS = {f"model.layers.{index}.self_attn": "LigerLlamaAttention" for index in range(2)}


def is_attention(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """An FSDP policy of the user's own."""
    return recurse or type(module).__name__.endswith("Attention")


def units_of(model: nn.Module, policy=None) -> dict[str, str]:
    """The FSDP units below the root."""
    fabric = launched_fabric(FabricLigerStrategy(auto_wrap_policy=policy))
    units = wrapped_units(fabric.setup_module(model))
    assert units.pop("_forward_module")
    return units


POLICIES = {
    "class": ({LlamaDecoderLayer}, LAYERS),
    "FSDP policy": (ModuleWrapPolicy({LlamaDecoderLayer}), LAYERS),
    "function": (is_attention, ATTENTIONS),
    "function of sizes": (lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel == 3 * 45 * 33, MLPS),
    # Patching changes classes, and a name has to find them still.
    "bare name of what was patched": (["LlamaMLP"], MLPS),
    "dotted name of what was patched": ([LLAMA + "LlamaMLP"], MLPS),
    "class of what was patched": ({LlamaMLP}, MLPS),
}


@pytest.mark.parametrize(("policy", "units"), POLICIES.values(), ids=POLICIES)
def test_layers_are_wrapped_or_recomputed_as_the_user_named_them(tmp_path, policy, units):
    assert units_of(build_model(), policy) == units
    strategy = LigerStrategy(activation_checkpointing_policy=policy)
    make_trainer(root=tmp_path, strategy=strategy).fit(LM(), make_loader(0, 1))
    (controlled,) = strategy._activations.controlled
    assert [type(layer).__name__ for layer in controlled.layers] == list(units.values())
    assert controlled.modes == ["recompute"] * 2


def test_layers_that_must_not_be_split_are_wrapped_by_default_and_several_kinds_if_named():
    assert units_of(build_model()) == LAYERS
    assert units_of(build_model(), [LLAMA + "LlamaDecoderLayer", "LlamaMLP"]) == LAYERS | MLPS


@pytest.mark.parametrize("argument", ["auto_wrap_policy", "activation_checkpointing_policy"])
def test_names_of_layers_that_the_model_does_not_have_are_refused(argument):
    for name in ("GPT2Block", "transformers.models.gpt2.modeling_gpt2.GPT2Block"):
        check_policy(argument, [name])  # nothing wrong with it yet
        with pytest.raises(ValueError, match=f"{argument} names the layer class '{name}'") as refused:
            resolve_policy(argument, [name], build_model())
        assert "LlamaDecoderLayer" in str(refused.value)


def test_model_that_names_no_layers_is_warned_of_and_becomes_one_unit():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="auto_wrap_policy was not given"):
        assert units_of(model) == {}
