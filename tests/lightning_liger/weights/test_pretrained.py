"""Weights of folders: the same as ``from_pretrained`` gives, on the meta device or not, and clear errors."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaForCausalLM, PreTrainedModel

from lightning_liger import load_pretrained
from lightning_liger.weights.meta_device import has_meta_tensors, initialize
from tests.lightning_liger.architectures import tiny_causal_lm
from tests.lightning_liger.strategies.test_meta_device import OnMeta
from tests.lightning_liger.strategies.workers.distributed import (
    Losses,
    build_model,
    make_batches,
    make_loader,
    make_trainer,
)
from tests.lightning_liger.tiny import TINY_CONFIG, tiny_batch, tiny_llama

CPU = torch.device("cpu")

# Plain names; Conv1D, tied; experts merged; experts and projections split; a state space; other names in the folder;
# tensors that are kept in float32; buffers in the folder.
ARCHITECTURES = ("llama", "gpt2", "mixtral", "phimoe", "mamba", "bloom", "deepseek_v3", "gemma3_text", "jamba", "olmoe")


def on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """Another of its kind, on the meta device."""
    with torch.device("meta"):
        return type(model)._from_config(model.config, dtype=model.dtype, attn_implementation="eager")


def loaded_on_meta(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Another of its kind, built on the meta device, with the folder's weights."""
    loaded = on_meta(model)
    load_pretrained(loaded, folder)
    initialize(loaded, CPU)
    return loaded


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    found, wanted = tensors(model), tensors(expected)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def rewrite(folder: Path, change: Any) -> None:
    """Changes the tensors of the one safetensors file in ``folder``."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


@pytest.fixture
def llama_folder(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(scope="module", params=ARCHITECTURES)
def saved(request, tmp_path_factory):
    """A model with unusual weights, and a folder that has them in the format of its architecture."""
    model, folder = tiny_causal_lm(request.param), tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="50KB")
    return model, folder


def test_weights_are_those_of_from_pretrained(saved):
    model, folder = saved
    expected = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    at_once = tiny_causal_lm(model.config.model_type, seed=1)
    load_pretrained(at_once, folder)
    for loaded in (at_once, loaded_on_meta(model, folder)):
        assert_equal(loaded, expected)
        assert not any(hasattr(tensor, "_is_hf_initialized") for tensor in tensors(loaded).values())


def test_random_weights_have_the_distributions_of_a_model_built_whole(saved):
    model, _ = saved
    torch.manual_seed(1)
    whole = tensors(type(model)._from_config(model.config, dtype=torch.float32, attn_implementation="eager"))
    made = on_meta(model)
    initialize(made, CPU)
    for name, tensor in tensors(made).items():
        expected = whole[name].double()
        deviation = expected.std().item() if expected.numel() > 1 else 0.0
        if deviation < 1e-6 * expected.abs().max() or name.endswith("inv_freq"):  # not drawn
            assert torch.equal(tensor, whole[name]), name
        elif tensor.numel() >= 100:
            spread = 6 * deviation / tensor.numel() ** 0.5
            assert tensor.std().item() == pytest.approx(deviation, abs=spread), name
            assert tensor.mean().item() == pytest.approx(expected.mean().item(), abs=1.5 * spread), name


def test_random_weights_follow_the_seed_of_which_one_number_is_drawn():
    def made(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        model = on_meta(tiny_llama())
        initialize(model, CPU)
        after = torch.rand(3)
        torch.manual_seed(seed)
        torch.randint(2**62, (1,))
        assert torch.equal(after, torch.rand(3))
        return tensors(model)

    first, second, other = made(0), made(0), made(1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    weights = [name for name in first if name.endswith("proj.weight")]
    assert not any(torch.equal(first[name], other[name]) for name in weights)
    # Modules of one shape differ, too.
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight", "both", "different"])
def test_tied_weights_may_have_any_of_their_names(tmp_path, kept):
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    weight = model.lm_head.weight.detach()

    def change(weights):
        del weights["model.embed_tokens.weight"]
        names = (kept,) if "." in kept else ("lm_head.weight", "model.embed_tokens.weight")
        weights |= {name: weight + number * (kept == "different") for number, name in enumerate(names)}

    rewrite(tmp_path, change)
    if kept == "different":
        with pytest.raises(ValueError, match=r"different weights for 'model\.embed_tokens\.weight' and 'lm_head\."):
            loaded_on_meta(model, tmp_path)
        return
    loaded = loaded_on_meta(model, tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_equal(loaded, model)


def test_weights_of_a_base_model_and_float16_ones_fit(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    model.model.half().save_pretrained(tmp_path)
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    loaded = loaded_on_meta(tiny_llama(tie_word_embeddings=True), tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, model.model.get_parameter(name).float()), name


def test_weights_in_pickled_files_are_read(tmp_path):
    model = tiny_llama()
    weights = list(model.state_dict().items())
    parts = {"pytorch_model-1.bin": dict(weights[:7]), "pytorch_model-2.bin": dict(weights[7:])}
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, part in parts.items():
        torch.save(part, tmp_path / file)
    assert_equal(loaded_on_meta(model, tmp_path), model)


def test_module_of_ones_own_is_loaded_by_its_names(tmp_path):
    expected = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    nn.init.normal_(expected[1].running_mean)
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    load_pretrained(module, tmp_path)
    initialize(module, CPU)
    assert_equal(module, expected)


def test_generation_config_is_read(llama_folder):
    settings = json.loads((llama_folder / "generation_config.json").read_text())
    (llama_folder / "generation_config.json").write_text(json.dumps(settings | {"temperature": 0.3, "do_sample": True}))
    model = on_meta(tiny_llama())
    load_pretrained(model, llama_folder)
    assert model.generation_config.temperature == 0.3


def test_unexpected_tensors_are_named_in_a_warning(llama_folder):
    rewrite(llama_folder, lambda weights: weights.update(extra=torch.zeros(1)))
    with pytest.warns(UserWarning, match="has tensors that the model does not have: extra"):
        load_pretrained(on_meta(tiny_llama()), llama_folder)


def test_quantized_weights_are_refused(llama_folder):
    model = on_meta(tiny_llama())
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="quantized weights cannot be trained"):
        load_pretrained(model, llama_folder)


# Memory and values


def test_tensors_stay_the_same_objects_with_what_was_set_on_them():
    with torch.device("meta"):
        module = nn.Linear(3, 5)
    weight = module.weight
    weight.no_decay = True
    module.bias.requires_grad_(False)
    initialize(module, CPU)
    assert (module.weight is weight, weight.no_decay, weight.device) == (True, True, CPU)
    assert (weight.requires_grad, module.bias.requires_grad) == (True, False)


def test_own_modules_are_reset_around_and_inside_tensors_that_have_values():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))
            self.real = nn.Linear(2, 2, device="cpu")
            self.blank = nn.Linear(3, 3)

        def reset_parameters(self) -> None:
            nn.init.constant_(self.scale, 7.0)

    with torch.device("meta"):
        module = Scaled()
    real = module.real.weight.detach().clone()
    initialize(module, CPU)
    assert module.scale.tolist() == [7.0] * 3
    assert torch.equal(module.real.weight, real)
    assert 0 < module.blank.weight.abs().max() <= 3**-0.5


def test_parameters_that_nothing_initializes_are_named():
    with torch.device("meta"):
        module = nn.ModuleDict({"inner": nn.ParameterList([torch.empty(3)]), "linear": nn.Linear(2, 2)})
    with pytest.raises(TypeError, match=r"of inner \(ParameterList\): expected a method reset_parameters"):
        initialize(module, CPU)
    assert module["linear"].weight.is_meta


def test_hugging_face_model_that_leaves_a_parameter_out_is_refused():
    with pytest.raises(RuntimeError, match=r"leaves 'bias' of 'lm_head' without initial values"):
        initialize(on_meta(tiny_causal_lm("reformer")), CPU)


def test_adapters_change_nothing_at_first(llama_folder):
    peft = pytest.importorskip("peft")
    model = on_meta(tiny_llama())
    load_pretrained(model, llama_folder)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head", "embed_tokens"]))
    initialize(model, CPU)
    assert torch.equal(model(**tiny_batch()).loss, tiny_llama()(**tiny_batch()).loss)
    others = [parameter for name, parameter in model.named_parameters() if "lora_A" in name or "embedding_B" in name]
    assert all(parameter.requires_grad and parameter.std() > 0.05 for parameter in others)


@pytest.mark.parametrize("strategy", ["liger", "liger_ddp", "liger_fsdp", "liger_model_parallel"])
def test_every_strategy_gives_a_model_on_meta_its_weights(llama_folder, strategy):
    fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    model = on_meta(tiny_llama())
    load_pretrained(model, llama_folder)
    loss = fabric.setup_module(model)(**tiny_batch()).loss
    torch.testing.assert_close(loss, tiny_llama()(**tiny_batch()).loss)


@pytest.mark.parametrize("strategy", ["liger", "liger_ddp", "liger_fsdp", "liger_model_parallel"])
def test_trainer_gives_a_model_on_meta_its_weights(tmp_path, strategy):
    stock = build_model()
    stock.save_pretrained(tmp_path)
    losses, module = Losses(), OnMeta(tmp_path)
    make_trainer(losses, root=tmp_path, strategy=strategy).fit(module, make_loader(0, 2))
    assert losses.losses[0] == pytest.approx(stock(**make_batches(0, 1)[0]).loss.item(), rel=1e-5)
    assert not has_meta_tensors(module)


# Parts of tensors, on a mesh whose other ranks are not there


@pytest.mark.parametrize("sizes", [(4, 1), (2, 2)], ids=["fsdp", "fsdp and tensor parallel"])
def test_last_rank_holds_the_parts_that_sharding_a_whole_model_gives_it(llama_folder, monkeypatch, sizes):
    monkeypatch.setattr("lightning_liger.weights.meta_device._seed_of_all_ranks", lambda: 0)
    # One rank only: DTensor's caches outlive the process group.
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data_parallel", "tensor_parallel"))
    plan = {"model.layers.*.mlp.up_proj": ColwiseParallel(), "model.layers.*.mlp.down_proj": RowwiseParallel()}
    plan |= {"lm_head": ColwiseParallel()}

    def sharded(model: LlamaForCausalLM) -> LlamaForCausalLM:
        if sizes[1] > 1:
            # Without communication: all ranks have the whole tensor, and each takes its shard.
            parallelize_module(model, mesh["tensor_parallel"], plan, src_data_rank=None)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    for source in ("folder", "random"):
        model, whole = on_meta(tiny_llama()), on_meta(tiny_llama())
        if source == "folder":
            load_pretrained(model, llama_folder)
            whole = tiny_llama()
        sharded(model)
        initialize(model, CPU, [module for module in model.modules() if isinstance(module, FSDPModule)])
        initialize(whole, CPU)
        for name, parameter in sharded(whole).named_parameters():
            found = model.get_parameter(name)
            assert isinstance(found, DTensor)
            assert found.placements == parameter.placements
            assert torch.equal(found.to_local(), parameter.to_local()), (source, name)
    assert TINY_CONFIG["vocab_size"] % 4  # the last part is a smaller one
