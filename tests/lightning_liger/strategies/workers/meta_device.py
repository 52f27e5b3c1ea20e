"""The worker that trains models built on the meta device on two processes, as ``test_meta_device.py`` compares them.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``. ``OUT``
has a Hugging Face folder for each head, and ``deep`` with a model of several layers.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
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
    NUM_STEPS,
    Losses,
    build_model,
    logit_counts,
    make_batches,
    make_trainer,
)

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
        self.initial = whole_tensors(self)


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


def whole_tensors(module: LM) -> dict[str, Tensor]:
    """The parameters and buffers of the model in ``module``, however it is sharded."""
    strategy_model = module.trainer.strategy.model
    if isinstance(strategy_model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(strategy_model, writeback=False):
            return _copied(module.model)
    return _copied(module.model)


def _copied(model: nn.Module) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {
        name.replace("_fsdp_wrapped_module.", ""): (
            (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()
        )
        for name, tensor in tensors.items()
    }


def _fit(run: dict[str, Any], module: OnMeta, strategy: Any, **options: Any) -> dict[str, Any]:
    recorder = Losses()
    ckpt_path, save_as = options.pop("ckpt_path", None), options.pop("save_as", None)
    batches = make_batches(run["rank"])[: options.pop("num_batches", None)]
    trainer = make_trainer(
        recorder, root=run["folder"], strategy=strategy, accelerator=run["accelerator"], devices=NUM_RANKS, **options
    )
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    if save_as is not None:
        trainer.save_checkpoint(run["folder"] / save_as)
    return {
        "losses": recorder.losses,
        "initial": module.initial,
        "whole": whole_tensors(module),
        "num_replaced": trainer.strategy.patch_report.num_replaced,
        "logit_counts": logit_counts(module),
    }


class Reads:
    """What is read of files: in all, in the largest piece, and the most that was there at one time; in bytes."""

    def __init__(self) -> None:
        self.total = self.largest = self.most = self._now = 0

    def note(self, tensor: Tensor) -> Tensor:
        size = tensor.nbytes
        self.total += size
        self.largest = max(self.largest, size)
        self._now += size
        self.most = max(self.most, self._now)
        weakref.finalize(tensor, self._forget, size)
        return tensor

    def _forget(self, size: int) -> None:
        self._now -= size

    @contextmanager
    def watching(self) -> Iterator[None]:
        reads = self

        class Slice:
            def __init__(self, source: Any) -> None:
                self.source = source
                self.get_shape, self.get_dtype = source.get_shape, source.get_dtype

            def __getitem__(self, index: Any) -> Tensor:
                return reads.note(self.source[index])

        class File:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self.file = safe_open(*args, **kwargs)
                self.keys = self.file.keys

            def get_slice(self, name: str) -> Slice:
                return Slice(self.file.get_slice(name))

        pretrained.safe_open = File
        try:
            yield
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


def _fabric(run: dict[str, Any], device: str, strategy: Any, how: str) -> dict[str, Any]:
    folder, reads = run["folder"] / "deep", Reads()
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

    with reads.watching():
        if how == "whole":
            peak, model = peak_bytes(device, lambda: fabric.setup_module(build()))
        else:
            model = build()
            peak, model = peak_bytes(device, lambda: fabric.setup_module(model))
    batch = {name: tensor.to(fabric.device) for name, tensor in make_batches(0, 1)[0].items()}
    placements = {str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}
    return {"peak": peak, "reads": vars(reads), "loss": model(**batch).loss.item(), "placements": placements}


def _run_rank(device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    run = {"rank": int(os.environ["RANK"]), "folder": folder, "accelerator": {"cuda": "gpu"}.get(device, device)}
    results: dict[str, Any] = {}
    for engine, strategy in ENGINES.items():
        for head, tied in HEADS.items():
            results[f"{engine}-{head}"] = _fit(
                run, OnMeta(folder / head, tied), engine, num_batches=NUM_PRETRAINED_STEPS
            )
        for module_class in (OnMeta, Whole):
            results[f"{engine}-bf16-{module_class.__name__}"] = _fit(
                run, module_class(folder / "untied"), engine, precision="bf16-true", num_batches=NUM_BF16_STEPS
            )
        for head, tied in HEADS.items():
            saved = {"save_as": f"{engine}-{head}.ckpt", "num_batches": NUM_STEPS if head == "untied" else 1}
            results[f"{engine}-random-{head}"] = _fit(run, OnMeta(None, tied), engine, **saved)
        sharded = {"state_dict_type": "sharded"} if engine == "liger_fsdp" else {}
        # The data repeats each epoch, so that resuming after one does not depend on how batches are skipped.
        epochs = {"num_batches": NUM_EPOCH_STEPS, "max_epochs": 2}
        results[f"{engine}-two-epochs"] = _fit(run, OnMeta(folder / "tied", True), engine, **epochs)
        _fit(
            run,
            OnMeta(folder / "tied", True),
            strategy(**sharded),
            **epochs | {"max_epochs": 1, "save_as": f"{engine}-sharded.ckpt"},
        )
        results[f"{engine}-second-epoch"] = _fit(
            run,
            OnMeta(None, True),
            strategy(**sharded),
            **epochs,
            ckpt_path=folder / f"{engine}-sharded.ckpt",
        )
        for how in ("whole", "pretrained", "random"):
            # Without kernels: what verifying them takes would be more than these small layers.
            results[f"{engine}-fabric-{how}"] = _fabric(run, device, FABRIC_ENGINES[engine](kernels="none"), how)
    results["tensor-parallel"] = _fabric(
        run, device, FabricLigerModelParallelStrategy(tensor_parallel_size=2), "pretrained"
    )
    results["by-its-user"] = _fit(
        run, ShardedOnMeta(folder / "untied"), "liger_model_parallel", num_batches=NUM_PRETRAINED_STEPS
    )
    torch.save(results, folder / f"rank{run['rank']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
