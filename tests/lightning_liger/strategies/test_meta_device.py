"""Models built on the meta device: sharded, then given their weights, train as those that were built whole."""

import functools
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_liger import (
    FabricLigerModelParallelStrategy,
    FabricLigerStrategy,
    LigerModelParallelStrategy,
    LigerStrategy,
    load_pretrained,
)
from lightning_liger.weights import pretrained
from lightning_liger.weights.export import export_pretrained
from lightning_liger.weights.meta_device import initialize
from tests.lightning_liger.strategies.workers.distributed import (
    HEADS,
    LM,
    NUM_RANKS,
    VOCAB_SIZE,
    build_model,
    make_batches,
)
from tests.lightning_liger.strategies.workers.trainings import (
    TOLERANCE,
    Reference,
    assert_trained_as,
    fit,
    rank_main,
    reference_training,
    whole_parameters,
)

ENGINES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "liger_fsdp": (lambda: LigerStrategy(state_dict_type="sharded"), FabricLigerStrategy),
    "liger_model_parallel": (LigerModelParallelStrategy, FabricLigerModelParallelStrategy),
}
"""Strategies that save shards, of Trainer and Fabric."""
NUM_STEPS = 6
NUM_EPOCH_STEPS = 2
NUM_DEEP_LAYERS = 12


class OnMeta(LM):
    """Built on the meta device, with the weights of a folder or random ones."""

    def __init__(self, folder: Any, tied: bool = False) -> None:
        super().__init__(tied)
        self.folder = folder
        self.initial: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            with torch.device("meta"):
                self.model = LlamaForCausalLM(build_model(self.tied).config).train()
            if self.folder is not None:
                load_pretrained(self.model, self.folder)
            torch.manual_seed(3 + int(os.environ.get("RANK", "0")))

    def on_fit_start(self) -> None:
        self.initial = whole_parameters(self.model, self.trainer.strategy.model, buffers=True)


class ShardedOnMeta(OnMeta):
    """Sharded on the meta device too, in another way than the strategy would."""

    def configure_model(self) -> None:
        is_new = getattr(self, "model", None) is None
        super().configure_model()
        for unit in (*(layer.mlp for layer in self.model.model.layers), self.model) if is_new else ():
            fully_shard(unit, mesh=self.device_mesh["data_parallel"])


def build_deep_model() -> LlamaForCausalLM:
    """A model most of whose parameters are in its many layers."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=NUM_DEEP_LAYERS, tie_word_embeddings=False, use_cache=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return LlamaForCausalLM(config)


@contextmanager
def noted_reads() -> Iterator[list[int]]:
    """The sizes in bytes of what is read of files in the block."""
    sizes: list[int] = []

    class Noted:
        def __init__(self, source: Any) -> None:
            self.source = source

        def __getattr__(self, name: str) -> Any:
            return getattr(self.source, name)

        def get_slice(self, name: str) -> Any:
            return Noted(self.source.get_slice(name))

        def __getitem__(self, index: Any) -> Tensor:
            tensor = self.source[index]
            sizes.append(tensor.nbytes)
            return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "safe_open", lambda *args, **kwargs: Noted(safe_open(*args, **kwargs)))
        yield sizes


def peak_bytes(device: str, action: Callable[[], Any]) -> tuple[int, Any]:
    """The most memory that tensors took while ``action`` ran, in addition to the memory before it, and its result."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = action()
        return torch.cuda.max_memory_allocated() - before, result
    gc.collect()  # what is freed meanwhile would be subtracted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = action()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, result


def _fabric(run: dict[str, Any], strategy: Any, how: str) -> dict[str, Any]:
    folder = run["folder"] / "deep"
    fabric = L.Fabric(strategy=strategy, accelerator=run["accelerator"], devices=NUM_RANKS)
    fabric.launch()

    def build() -> nn.Module:
        if how == "whole":
            with fabric.device:
                return LlamaForCausalLM.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="sdpa")
        if how == "pretrained":
            load_pretrained(model, folder)  # opens files, whose size the profiler would count
        return model

    with noted_reads() as reads:
        model = None if how == "whole" else build()
        peak, model = peak_bytes(run["device"], lambda: fabric.setup_module(model or build()))
    batch = {name: tensor.to(fabric.device) for name, tensor in make_batches(0, 1)[0].items()}
    placements = {str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}
    return {"peak": peak, "reads": reads, "loss": model(**batch).loss.item(), "placements": placements}


def results(run: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    folder = run["folder"]

    def train(name: str, module: OnMeta, strategy: Any, num_batches: int, **options: Any) -> None:
        found[name] = fit(run, strategy, module, make_batches(run["rank"])[:num_batches], **options)
        found[name]["initial"] = module.initial

    for engine, (sharded, _) in ENGINES.items():
        for head, tied in HEADS.items():
            train(f"{engine}-{head}", OnMeta(folder / head, tied), engine, NUM_STEPS)
            train(f"{engine}-random-{head}", OnMeta(None, tied), engine, 1, save_as=f"{engine}-{head}.ckpt")
        train(f"{engine}-bf16", OnMeta(folder / "untied"), engine, 1, precision="bf16-true")
        # The data repeats each epoch, so that resuming after one does not depend on how batches are skipped.
        path = folder / f"{engine}-sharded.ckpt"
        train("saved", OnMeta(folder / "tied", True), sharded(), NUM_EPOCH_STEPS, save_as=path.name)
        resumed = {"max_epochs": 2, "ckpt_path": path}
        train(f"{engine}-second-epoch", OnMeta(None, True), sharded(), NUM_EPOCH_STEPS, **resumed)
    train("by-its-user", ShardedOnMeta(folder / "untied"), "liger_model_parallel", NUM_STEPS)
    # Last, as a process has crashed in a training after PyTorch's profiler.
    for engine, (_, fabric_strategy) in ENGINES.items():
        for how in ("whole", "pretrained", "random"):
            # Without kernels: what verifying them takes would be more than these small layers.
            found[f"{engine}-fabric-{how}"] = _fabric(run, fabric_strategy(kernels="none"), how)
    found["tensor-parallel"] = _fabric(run, FabricLigerModelParallelStrategy(tensor_parallel_size=2), "pretrained")
    return found


# What is checked of them


@functools.cache
def reference_of(head: str, device: str, num_steps: int = NUM_STEPS, num_fits: int = 1) -> Reference:
    batches = [make_batches(rank)[:num_steps] * num_fits for rank in range(NUM_RANKS)]
    return reference_training(build_model(HEADS[head]), batches, device)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.equal(expected[name].detach().cpu()), name


def prepare(folder: Path) -> None:
    for head, tied in HEADS.items():
        build_model(tied).save_pretrained(folder / head, max_shard_size="20KB")
        assert len(list((folder / head).glob("*.safetensors"))) > 2
    build_deep_model().save_pretrained(folder / "deep", max_shard_size="500KB")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("engine", ENGINES)
def test_model_on_meta_with_a_folders_weights_trains_as_one_process_with_the_stock_model(ranks, engine, head):
    device, results, _ = ranks
    runs = [result[f"{engine}-{head}"] for result in results]
    assert_trained_as(reference_of(head, device), runs, device)
    for run in runs:
        assert_equal(run["initial"], tensors_of(build_model(HEADS[head])))
        assert (run["num_replaced"], run["logit_counts"]) == (10, (NUM_STEPS, 0))


def test_model_that_its_user_sharded_on_meta_trains_as_the_stock_model(ranks):
    device, results, _ = ranks
    assert_trained_as(reference_of("untied", device), [result["by-its-user"] for result in results], device)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_and_buffers_in_bfloat16_are_those_of_the_model_built_whole(ranks, engine):
    _, results, folder = ranks
    expected = tensors_of(LlamaForCausalLM.from_pretrained(folder / "untied", dtype=torch.bfloat16))
    assert {tensor.dtype for tensor in expected.values()} == {torch.float32, torch.bfloat16}
    for result in results:
        assert_equal(result[f"{engine}-bf16"]["initial"], expected)


@pytest.mark.parametrize("head", HEADS)
def test_random_weights_are_the_same_for_every_engine_and_number_of_ranks(ranks, head):
    device, results, _ = ranks
    alone = OnMeta(None, HEADS[head])
    alone.configure_model()
    initialize(alone, torch.device(device))
    expected = tensors_of(alone.model)
    for result in results:
        for engine in ENGINES:
            assert_equal(result[f"{engine}-random-{head}"]["initial"], expected)
    weight = expected["model.layers.0.mlp.down_proj.weight"]
    assert weight.std().item() == pytest.approx(alone.model.config.initializer_range, rel=0.1)
    assert (expected["model.norm.weight"] == 1).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_sharded_checkpoint_is_loaded_over_a_model_built_on_meta(ranks, engine):
    device, results, _ = ranks
    both = reference_of("tied", device, NUM_EPOCH_STEPS, 2)
    second = both._replace(losses=[losses[NUM_EPOCH_STEPS:] for losses in both.losses])
    assert_trained_as(second, [result[f"{engine}-second-epoch"] for result in results], device)


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
    sizes = [parameter.nbytes for parameter in build_deep_model().parameters()]
    flat, sharded = ([result[f"{engine}-fabric-pretrained"]["reads"] for result in results] for engine in ENGINES)
    assert [sum(reads) for reads in flat] == [sum(sizes)] * NUM_RANKS
    assert sum(map(sum, sharded)) == sum(sizes)
    assert max(map(max, flat)) == max(sizes)
    assert max(map(max, sharded)) == -(-max(sizes) // NUM_RANKS)
    assert not any(result[f"{engine}-fabric-random"]["reads"] for result in results for engine in ENGINES)


def test_fabric_computes_what_the_stock_model_does(ranks):
    device, results, _ = ranks
    loss = build_deep_model()(**make_batches(0, 1)[0]).loss.item()
    ways = [f"{engine}-fabric-{how}" for engine in ENGINES for how in ("pretrained", "whole")]
    for result in results:
        for way in (*ways, "tensor-parallel"):
            assert result[way]["loss"] == pytest.approx(loss, rel=TOLERANCE[device])
        # Ranks read their parts of tensors that are sharded over two dimensions.
        assert "(Shard(dim=0), Shard(dim=1))" in result["tensor-parallel"]["placements"]


@pytest.mark.parametrize("head", [*HEADS, "sharded"])
@pytest.mark.parametrize("engine", ENGINES)
def test_checkpoints_of_all_ranks_are_exported_to_folders_that_the_stock_model_loads(ranks, tmp_path, engine, head):
    device, results, folder = ranks
    tied = HEADS.get(head, True)
    # Of liger_fsdp a file, unless it is told otherwise, of liger_model_parallel a folder.
    assert (folder / f"{engine}-{head}.ckpt").is_dir() == (engine == "liger_model_parallel" or head == "sharded")
    export_pretrained(OnMeta(None, tied), folder / f"{engine}-{head}.ckpt", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is LlamaForCausalLM
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    if head in HEADS:
        assert_equal(
            dict(model.named_parameters(remove_duplicate=False)), results[0][f"{engine}-random-{head}"]["whole"]
        )
    else:  # saved before the first of these steps
        loss = results[0][f"{engine}-second-epoch"]["losses"][0]
        assert model(**make_batches(0)[0]).loss.item() == pytest.approx(loss, rel=TOLERANCE[device])


if __name__ == "__main__":
    rank_main(results)
