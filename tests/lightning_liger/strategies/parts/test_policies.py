"""Which layers become FSDP units or are recomputed, however they are named."""

import lightning as L
import pytest
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from lightning_liger import FabricLigerStrategy, LigerStrategy
from lightning_liger.strategies.parts.policies import check_policy, resolve_policy
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    build_model,
    make_loader,
    make_trainer,
    wrapped_units,
)

LLAMA = "transformers.models.llama.modeling_llama."
LAYERS = {"model.layers.0": "LlamaDecoderLayer", "model.layers.1": "LlamaDecoderLayer"}
MLPS = {"model.layers.0.mlp": "LigerLlamaMLP", "model.layers.1.mlp": "LigerLlamaMLP"}
ARGUMENTS = ["auto_wrap_policy", "activation_checkpointing_policy"]


def is_attention(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """An FSDP policy of the user's own."""
    return recurse or type(module).__name__.endswith("Attention")


def units_of(model: nn.Module, policy=None) -> dict[str, str]:
    """The FSDP units below the root."""
    fabric = L.Fabric(strategy=FabricLigerStrategy(auto_wrap_policy=policy), accelerator="cpu", devices=1)
    fabric.launch()
    units = wrapped_units(fabric.setup_module(model))
    assert units.pop("_forward_module")
    return units


@pytest.mark.parametrize(
    ("policy", "units"),
    [
        pytest.param(None, LAYERS, id="default"),
        pytest.param({LlamaDecoderLayer}, LAYERS, id="class"),
        pytest.param([LLAMA + "LlamaDecoderLayer", "LlamaMLP"], LAYERS | MLPS, id="names"),
        pytest.param(ModuleWrapPolicy({LlamaDecoderLayer}), LAYERS, id="FSDP policy"),
        pytest.param(
            is_attention,
            {f"model.layers.{index}.self_attn": "LigerLlamaAttention" for index in range(2)},
            id="function",
        ),
        # Patching changes classes, and a name has to find them still.
        pytest.param(["LlamaMLP"], MLPS, id="bare name of what was patched"),
        pytest.param([LLAMA + "LlamaMLP"], MLPS, id="dotted name of what was patched"),
        pytest.param({LlamaMLP}, MLPS, id="class of what was patched"),
    ],
)
def test_layers_are_wrapped_as_the_user_named_them(policy, units):
    assert units_of(build_model(), policy) == units


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_names_of_no_layer_class_are_refused(argument):
    linear = "torch.nn.functional.linear"
    for name, message in (
        ("no_such_package.Layer", "cannot be imported"),
        (LLAMA + "NoSuchLayer", "cannot be imported"),
        (linear, f"must name subclasses of torch.nn.Module, got '{linear}'"),
    ):
        for strategy in (LigerStrategy, FabricLigerStrategy):
            with pytest.raises(ValueError, match=message) as refused:
                strategy(**{argument: [name]})
            assert argument in str(refused.value)
            assert name in str(refused.value)
    for name in ("GPT2Block", "transformers.models.gpt2.modeling_gpt2.GPT2Block"):
        check_policy(argument, [name])  # nothing wrong with it yet
        with pytest.raises(ValueError, match=f"{argument} names the layer class '{name}'") as refused:
            resolve_policy(argument, [name], build_model())
        assert "LlamaDecoderLayer" in str(refused.value)


def test_model_that_names_no_layers_is_warned_of_and_becomes_one_unit():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="auto_wrap_policy was not given"):
        assert units_of(model) == {}


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ({LlamaDecoderLayer}, "LlamaDecoderLayer"),
        ([LLAMA + "LlamaMLP"], "LigerLlamaMLP"),
        (ModuleWrapPolicy({LlamaDecoderLayer}), "LlamaDecoderLayer"),
        (is_attention, "LigerLlamaAttention"),
        (lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel == 3 * 45 * 33, "LigerLlamaMLP"),
    ],
    ids=["classes", "names", "FSDP policy", "function", "function of sizes"],
)
def test_activation_checkpointing_recomputes_the_named_layers(tmp_path, policy, kind):
    strategy = LigerStrategy(activation_checkpointing_policy=policy)
    make_trainer(root=tmp_path, strategy=strategy).fit(LM(), make_loader(0, 1))
    (controlled,) = strategy._activations.controlled
    assert [type(layer).__name__ for layer in controlled.layers] == [kind, kind]
    assert controlled.modes == ["recompute"] * 2
