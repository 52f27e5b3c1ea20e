"""Which layers become FSDP units or are recomputed, however they are named."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from lightning_liger import FabricLigerStrategy, LigerStrategy
from lightning_liger.strategies.parts.policies import (
    check_policy,
    decoder_layer_classes,
    resolve_policy,
    select_modules,
)
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    Losses,
    build_model,
    make_loader,
    make_trainer,
    wrapped_units,
)

LLAMA = "transformers.models.llama.modeling_llama."
LAYERS = {"model.layers.0": "LlamaDecoderLayer", "model.layers.1": "LlamaDecoderLayer"}
MLPS = {"model.layers.0.mlp": "LigerLlamaMLP", "model.layers.1.mlp": "LigerLlamaMLP"}


def is_attention(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """An FSDP policy of the user's own."""
    return recurse or type(module).__name__.endswith("Attention")


def units_of(model: nn.Module, policy=None, **options) -> dict[str, str]:
    """The FSDP units below the root, and the root's modules."""
    fabric = L.Fabric(strategy=FabricLigerStrategy(auto_wrap_policy=policy, **options), accelerator="cpu", devices=1)
    fabric.launch()
    units = wrapped_units(fabric.setup_module(model))
    assert "_forward_module" in units
    return {name: kind for name, kind in units.items() if name != "_forward_module"}


def test_each_decoder_layer_is_a_unit_by_default_and_head_and_embeddings_are_not():
    model = build_model()
    assert decoder_layer_classes(model) == {LlamaDecoderLayer}
    assert units_of(model) == LAYERS


def test_decoder_layers_are_found_inside_a_lightning_module():
    module = LM()
    assert decoder_layer_classes(module) == set()
    module.configure_model()
    assert decoder_layer_classes(module) == {LlamaDecoderLayer}


@pytest.mark.parametrize(
    ("policy", "units"),
    [
        pytest.param({LlamaDecoderLayer}, LAYERS, id="class"),
        pytest.param(["LlamaDecoderLayer"], LAYERS, id="bare name"),
        pytest.param([LLAMA + "LlamaDecoderLayer"], LAYERS, id="dotted name"),
        pytest.param([LLAMA + "LlamaDecoderLayer", "LlamaMLP"], LAYERS | MLPS, id="two names"),
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


@pytest.mark.parametrize("argument", ["auto_wrap_policy", "activation_checkpointing_policy"])
@pytest.mark.parametrize("strategy", [LigerStrategy, FabricLigerStrategy])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.Layer", "cannot be imported"),
        (LLAMA + "NoSuchLayer", "cannot be imported"),
        ("torch.nn.functional.linear", "must name subclasses of torch.nn.Module, got 'torch.nn.functional.linear'"),
    ],
)
def test_dotted_name_of_no_layer_class_is_refused_at_once(strategy, argument, name, message):
    with pytest.raises(ValueError, match=message) as refused:
        strategy(**{argument: [name]})
    assert argument in str(refused.value)
    assert name in str(refused.value)


@pytest.mark.parametrize("argument", ["auto_wrap_policy", "activation_checkpointing_policy"])
@pytest.mark.parametrize("name", ["GPT2Block", "transformers.models.gpt2.modeling_gpt2.GPT2Block"])
def test_name_of_a_layer_that_the_model_lacks_is_refused_with_those_it_has(argument, name):
    check_policy(argument, [name])  # nothing wrong with it yet
    with pytest.raises(ValueError, match=f"{argument} names the layer class '{name}'") as refused:
        resolve_policy(argument, [name], build_model())
    assert "LlamaDecoderLayer" in str(refused.value)


@pytest.mark.parametrize("policy", [None, is_attention, ModuleWrapPolicy({LlamaDecoderLayer})])
def test_policies_without_names_stay_as_they_are(policy):
    assert resolve_policy("auto_wrap_policy", policy, build_model()) is policy


def test_model_that_names_no_layers_is_warned_of_and_becomes_one_unit():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="auto_wrap_policy was not given"):
        assert units_of(model) == {}


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ({LlamaDecoderLayer}, "LlamaDecoderLayer"),
        (["LlamaDecoderLayer"], "LlamaDecoderLayer"),
        ([LLAMA + "LlamaMLP"], "LigerLlamaMLP"),
    ],
    ids=["class", "bare name", "dotted name of what was patched"],
)
def test_activation_checkpointing_recomputes_the_named_layers_and_keeps_the_losses(tmp_path, policy, kind):
    plain, checkpointed = Losses(), Losses()
    make_trainer(plain, root=tmp_path, strategy="liger_fsdp").fit(LM(), make_loader(0, 4))
    strategy = LigerStrategy(activation_checkpointing_policy=policy)
    make_trainer(checkpointed, root=tmp_path, strategy=strategy).fit(LM(), make_loader(0, 4))
    (controlled,) = strategy._activations.controlled
    assert [type(layer).__name__ for layer in controlled.layers] == [kind, kind]
    assert controlled.modes == ["recompute"] * 2
    torch.testing.assert_close(checkpointed.losses, plain.losses, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (ModuleWrapPolicy({LlamaDecoderLayer}), ["0", "1"]),
        ({LlamaDecoderLayer}, ["0", "1"]),
        (is_attention, ["0.self_attn", "1.self_attn"]),
        (lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel == 3 * 45 * 33, ["0.mlp", "1.mlp"]),
    ],
    ids=["FSDP policy", "classes", "function", "function of sizes"],
)
def test_policies_choose_the_modules_that_pytorch_would_wrap_and_change_none(policy, names):
    model = build_model()
    before = dict(model.named_modules())
    assert select_modules(policy, model) == {before[f"model.layers.{name}"] for name in names}
    assert dict(model.named_modules()) == before


def test_layers_are_stored_but_for_cheap_tensors_by_default(tmp_path):
    strategy = LigerStrategy()
    make_trainer(root=tmp_path, strategy=strategy).fit(LM(), make_loader(0, 1))
    (controlled,) = strategy._activations.controlled
    assert controlled.modes == ["cheap"] * 2
