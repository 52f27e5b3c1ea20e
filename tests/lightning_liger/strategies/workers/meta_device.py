"""Trainings of models built on the meta device, as ``test_meta_device.py`` compares them.

Their folder has a Hugging Face folder for each head, and ``deep`` with a model of several layers.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from lightning_liger import (
    FabricLigerModelParallelStrategy,
    FabricLigerStrategy,
    LigerModelParallelStrategy,
    LigerStrategy,
    load_pretrained,
)
from lightning_liger.weights import pretrained
from tests.lightning_liger.strategies.workers.distributed import (
    HEADS,
    LM,
    NUM_RANKS,
    build_model,
    make_batches,
)
from tests.lightning_liger.strategies.workers.trainings import fit, rank_main, whole_parameters

ENGINES: dict[str, Callable[..., Any]] = {
    "liger_fsdp": LigerStrategy,
    "liger_model_parallel": LigerModelParallelStrategy,
}
SEED = 3
FABRIC_ENGINES = {"liger_fsdp": FabricLigerStrategy, "liger_model_parallel": FabricLigerModelParallelStrategy}
NUM_PRETRAINED_STEPS = 6
NUM_BF16_STEPS = 2
NUM_EPOCH_STEPS = 2


class OnMeta(LM):
    """Built on the meta device, with the weights of a folder or random ones."""

    def __init__(self, folder: Path | None, tied: bool = False) -> None:
        super().__init__(tied)
        self.folder = folder
        self.initial: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if getattr(self, "model", None) is not None:
            return
        with torch.device("meta"):
            self.model = LlamaForCausalLM(build_model(self.tied).config).train()
        if self.folder is not None:
            load_pretrained(self.model, self.folder)
        torch.manual_seed(SEED + int(os.environ.get("RANK", "0")))

    def on_fit_start(self) -> None:
        self.initial = whole_parameters(self.model, self.trainer.strategy.model, buffers=True)


class ShardedOnMeta(OnMeta):
    """Sharded on the meta device too, in another way than the strategy would."""

    def configure_model(self) -> None:
        if getattr(self, "model", None) is not None:
            return
        super().configure_model()
        for layer in self.model.model.layers:
            fully_shard(layer.mlp, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


class Whole(OnMeta):
    """The same weights, built as one."""

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            self.model = LlamaForCausalLM.from_pretrained(self.folder, dtype=torch.get_default_dtype()).train()


class Slice:
    """A tensor in a file, whose reads are noted by their sizes in bytes."""

    def __init__(self, source: Any, sizes: list[int]) -> None:
        self.source, self.sizes = source, sizes
        self.get_shape, self.get_dtype = source.get_shape, source.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        tensor = self.source[index]
        self.sizes.append(tensor.nbytes)
        return tensor


@contextmanager
def noted_reads() -> Iterator[list[int]]:
    """The sizes in bytes of what is read of files in the block."""
    sizes: list[int] = []

    class File:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)
            self.keys = self.file.keys

        def get_slice(self, name: str) -> Slice:
            return Slice(self.file.get_slice(name), sizes)

    pretrained.safe_open = File
    try:
        yield sizes
    finally:
        pretrained.safe_open = safe_open


def peak_bytes(device: str, action: Callable[[], Any]) -> tuple[int, Any]:
    """The most memory that tensors took while ``action`` ran, in addition to the memory before it, and its result."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = action()
        return torch.cuda.max_memory_allocated() - before, result
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

    for engine, strategy in ENGINES.items():
        for head, tied in HEADS.items():
            train(f"{engine}-{head}", OnMeta(folder / head, tied), engine, NUM_PRETRAINED_STEPS)
            train(f"{engine}-random-{head}", OnMeta(None, tied), engine, 1, save_as=f"{engine}-{head}.ckpt")
        for kind in (OnMeta, Whole):
            module = kind(folder / "untied")
            train(f"{engine}-bf16-{kind.__name__}", module, engine, NUM_BF16_STEPS, precision="bf16-true")
        sharded = {"state_dict_type": "sharded"} if engine == "liger_fsdp" else {}
        # The data repeats each epoch, so that resuming after one does not depend on how batches are skipped.
        path = folder / f"{engine}-sharded.ckpt"
        train(f"{engine}-two-epochs", OnMeta(folder / "tied", True), engine, NUM_EPOCH_STEPS, max_epochs=2)
        train("saved", OnMeta(folder / "tied", True), strategy(**sharded), NUM_EPOCH_STEPS, save_as=path.name)
        resumed = {"max_epochs": 2, "ckpt_path": path}
        train(f"{engine}-second-epoch", OnMeta(None, True), strategy(**sharded), NUM_EPOCH_STEPS, **resumed)
        for how in ("whole", "pretrained", "random"):
            # Without kernels: what verifying them takes would be more than these small layers.
            found[f"{engine}-fabric-{how}"] = _fabric(run, FABRIC_ENGINES[engine](kernels="none"), how)
    found["tensor-parallel"] = _fabric(run, FabricLigerModelParallelStrategy(tensor_parallel_size=2), "pretrained")
    train("by-its-user", ShardedOnMeta(folder / "untied"), "liger_model_parallel", NUM_PRETRAINED_STEPS)
    return found


if __name__ == "__main__":
    rank_main(results)
