"""Models built on the meta device: sharded, then given their weights, train as those that were built whole."""

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_liger.weights.export import export_pretrained
from lightning_liger.weights.materialize import materialize
from tests.lightning_liger.strategies.workers.distributed import (
    HEADS,
    NUM_RANKS,
    VOCAB_SIZE,
    build_model,
    launch,
    make_batches,
)
from tests.lightning_liger.strategies.workers.meta_device import (
    ENGINES,
    NUM_BF16_STEPS,
    NUM_EPOCH_STEPS,
    NUM_PRETRAINED_STEPS,
    OnMeta,
)
from tests.lightning_liger.strategies.workers.trainings import (
    TOLERANCE,
    Reference,
    assert_same_parameters,
    assert_trained_as,
    reference_training,
)

NUM_DEEP_LAYERS = 12


@functools.cache
def reference_of(head: str, device: str) -> Reference:
    batches = [make_batches(rank, NUM_PRETRAINED_STEPS) for rank in range(NUM_RANKS)]
    return reference_training(build_model(HEADS[head]), batches, device)


def build_deep_model() -> LlamaForCausalLM:
    """A model most of whose parameters are in its many layers."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=NUM_DEEP_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return LlamaForCausalLM(config)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request, tmp_path_factory):
    """The device, what all ranks got out of every run, and the folder with what they read and saved."""
    folder = tmp_path_factory.mktemp("ranks")
    for head, tied in HEADS.items():
        build_model(tied).save_pretrained(folder / head, max_shard_size="20KB")
        assert len(list((folder / head).glob("*.safetensors"))) > 2
    build_deep_model().save_pretrained(folder / "deep", max_shard_size="500KB")
    return (
        request.param,
        launch(request.param, folder, worker="tests.lightning_liger.strategies.workers.meta_device"),
        folder,
    )


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("engine", ENGINES)
def test_model_on_meta_with_a_folders_weights_trains_as_one_process_with_the_stock_model(ranks, engine, head):
    device, results, _ = ranks
    stock = build_model(HEADS[head])
    expected = dict(stock.named_parameters(remove_duplicate=False)) | dict(stock.named_buffers())
    runs = [result[f"{engine}-{head}"] for result in results]
    assert_trained_as(reference_of(head, device), runs, device)
    for run in runs:
        assert run["initial"].keys() == expected.keys()
        assert [name for name, tensor in run["initial"].items() if not tensor.equal(expected[name])] == []
        assert (run["num_replaced"], run["logit_counts"]) == (10, (NUM_PRETRAINED_STEPS, 0))


def test_model_that_its_user_sharded_on_meta_trains_as_the_stock_model(ranks):
    device, results, _ = ranks
    assert_trained_as(reference_of("untied", device), [result["by-its-user"] for result in results], device)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_and_buffers_in_bfloat16_are_those_of_the_model_built_whole(ranks, engine):
    device, results, _ = ranks
    for result in results:
        run, whole = (result[f"{engine}-bf16-{kind}"] for kind in ("OnMeta", "Whole"))
        assert run["initial"].keys() == whole["initial"].keys()
        for name, tensor in run["initial"].items():
            assert tensor.dtype == (torch.float32 if "inv_freq" in name else torch.bfloat16), name
        assert all(torch.equal(tensor, whole["initial"][name]) for name, tensor in run["initial"].items())
        assert len(run["losses"]) == NUM_BF16_STEPS
        torch.testing.assert_close(run["losses"], whole["losses"], rtol=0.0 if device == "cpu" else 1e-2, atol=0.0)


@pytest.mark.parametrize("head", HEADS)
def test_random_weights_are_the_same_for_every_engine_and_number_of_ranks(ranks, head):
    device, results, _ = ranks
    alone = OnMeta(None, HEADS[head])
    alone.configure_model()
    materialize(alone, torch.device(device))
    expected = dict(alone.model.named_parameters(remove_duplicate=False)) | dict(alone.model.named_buffers())
    for result in results:
        for engine in ENGINES:
            initial = result[f"{engine}-random-{head}"]["initial"]
            assert initial.keys() == expected.keys()
            assert [name for name, tensor in initial.items() if not torch.equal(tensor, expected[name].cpu())] == []
    weight = expected["model.layers.0.mlp.down_proj.weight"]
    assert weight.std().item() == pytest.approx(alone.model.config.initializer_range, rel=0.1)
    assert (expected["model.norm.weight"] == 1).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_sharded_checkpoint_is_loaded_over_a_model_built_on_meta(ranks, engine):
    device, results, _ = ranks
    for result in results:
        resumed, expected = result[f"{engine}-second-epoch"], result[f"{engine}-two-epochs"]
        torch.testing.assert_close(
            resumed["losses"], expected["losses"][NUM_EPOCH_STEPS:], rtol=TOLERANCE[device], atol=1e-7
        )
        assert_same_parameters(resumed["whole"], expected["whole"], 10 * TOLERANCE[device])


@pytest.mark.parametrize("engine", ENGINES)
def test_no_rank_ever_holds_the_whole_model(ranks, engine):
    _, results, _ = ranks
    model = build_deep_model()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    around = whole - NUM_DEEP_LAYERS * layer
    for result in results:
        assert result[f"{engine}-fabric-whole"]["peak"] > whole
        for how in ("pretrained", "random"):
            # Beside what it holds in the end, two copies of a unit: its parameters, and FSDP's flat one of them.
            assert result[f"{engine}-fabric-{how}"]["peak"] < 1.2 * whole / NUM_RANKS + 2 * max(layer, around)
            assert result[f"{engine}-fabric-{how}"]["peak"] < 0.9 * whole


def test_ranks_read_one_tensor_at_a_time_and_under_fsdp2_only_what_they_hold(ranks):
    _, results, _ = ranks
    model = build_deep_model()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    flat, sharded = ([result[f"{engine}-fabric-pretrained"]["reads"] for result in results] for engine in ENGINES)
    assert [sum(reads) for reads in flat] == [whole] * NUM_RANKS
    assert sum(map(sum, sharded)) == whole
    assert max(map(max, flat)) == largest
    assert max(map(max, sharded)) == -(-largest // NUM_RANKS)
    assert not any(result[f"{engine}-fabric-random"]["reads"] for result in results for engine in ENGINES)


def test_fabric_computes_what_the_stock_model_does(ranks):
    device, results, _ = ranks
    loss = build_deep_model()(**make_batches(0, 1)[0]).loss.item()
    for result in results:
        for way in (f"{engine}-fabric-{how}" for engine in ENGINES for how in ("pretrained", "whole")):
            assert result[way]["loss"] == pytest.approx(loss, rel=TOLERANCE[device])
        # Ranks read their parts of tensors that are sharded over two dimensions.
        assert "(Shard(dim=0), Shard(dim=1))" in result["tensor-parallel"]["placements"]
        assert result["tensor-parallel"]["loss"] == pytest.approx(loss, rel=TOLERANCE[device])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("engine", ENGINES)
def test_checkpoints_of_all_ranks_are_exported_to_folders_that_the_stock_model_loads(ranks, tmp_path, engine, head):
    _, results, folder = ranks
    # Of liger_fsdp a file, of liger_model_parallel a folder.
    assert (folder / f"{engine}-{head}.ckpt").is_dir() == (engine == "liger_model_parallel")
    export_pretrained(OnMeta(None, HEADS[head]), folder / f"{engine}-{head}.ckpt", tmp_path)
    assert_exported(tmp_path, results[0][f"{engine}-random-{head}"]["whole"], HEADS[head])


@pytest.mark.parametrize("engine", ENGINES)
def test_sharded_checkpoint_of_a_tied_model_is_exported(ranks, tmp_path, engine):
    device, results, folder = ranks
    assert (folder / f"{engine}-sharded.ckpt").is_dir()
    export_pretrained(OnMeta(None, True), folder / f"{engine}-sharded.ckpt", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # Saved before the last of these steps.
    batch = make_batches(0)[0]
    assert model(**batch).loss.item() == pytest.approx(
        results[0][f"{engine}-second-epoch"]["losses"][0], rel=TOLERANCE[device]
    )


def assert_exported(folder: Path, weights: dict[str, torch.Tensor], tied: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(parameter, weights[name]), name
