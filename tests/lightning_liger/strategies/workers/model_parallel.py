"""The worker that trains under FSDP2 on two processes in every way that ``test_model_parallel.py`` compares.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_liger import LigerModelParallelStrategy
from tests.lightning_liger.strategies.workers.distributed import (
    HEADS,
    LM,
    NUM_RANKS,
    AddsToLoss,
    Losses,
    build_model,
    logit_counts,
    make_batches,
    make_optimizer,
    make_trainer,
    make_uneven_batches,
)

MAX_NORM = 0.5


class ShardedByItsUser(LM):
    """Shards another way than the strategy would, in ``configure_model``."""

    def configure_model(self) -> None:
        if getattr(self, "model", None) is not None:
            return
        super().configure_model()
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer.mlp, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class CountsForwards(LM):
    """Counts how often the MLP of the first layer runs."""

    num_forwards = 0

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            super().configure_model()
            self.model.model.layers[0].mlp.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, args: Any) -> None:
        self.num_forwards += 1


def _whole(module: LM) -> dict[str, Tensor]:
    parameters = module.model.named_parameters(remove_duplicate=False)
    return {name: parameter.full_tensor().detach().cpu().clone() for name, parameter in parameters}


def _fit(run: dict[str, Any], module: LM, make: Any = make_batches, **options: Any) -> dict[str, Any]:
    recorder = Losses()
    strategy = options.pop("strategy", "liger_model_parallel")
    trainer = make_trainer(
        recorder, root=run["folder"], strategy=strategy, accelerator=run["accelerator"], devices=NUM_RANKS, **options
    )
    loader = DataLoader(make(run["rank"]), batch_size=None)
    trainer.fit(module, loader)
    result = {
        "losses": recorder.losses,
        "num_replaced": trainer.strategy.patch_report.num_replaced,
        "logit_counts": logit_counts(module),
        "units": [type(part).__name__ for part in module.modules() if isinstance(part, FSDPModule)],
        "whole": _whole(module),
        "num_forwards": getattr(module, "num_forwards", None),
    }
    (result["validation"],) = trainer.validate(module, loader, verbose=False)
    result["counts_after_validation"] = logit_counts(module)
    return result


def _fabric(run: dict[str, Any], tied: bool) -> dict[str, Any]:
    fabric = L.Fabric(strategy="liger_model_parallel", accelerator=run["accelerator"], devices=NUM_RANKS)
    fabric.launch()
    model = fabric.setup_module(build_model(tied))
    optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
    losses = []
    for batch in make_batches(run["rank"]):
        optimizer.zero_grad()
        loss = model(**{name: tensor.to(fabric.device) for name, tensor in batch.items()}).loss
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    parameters = model.module.named_parameters(remove_duplicate=False)
    whole = {name: parameter.full_tensor().detach().cpu().clone() for name, parameter in parameters}
    num_replaced = fabric.strategy.patch_report.num_replaced
    return {"losses": losses, "whole": whole, "num_replaced": num_replaced, "logit_counts": logit_counts(model)}


def _run_rank(device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    run = {"rank": int(os.environ["RANK"]), "folder": folder, "accelerator": {"cuda": "gpu"}.get(device, device)}
    results: dict[str, Any] = {}
    for head, tied in HEADS.items():
        results[head] = _fit(run, LM(tied))
        results[f"fabric-{head}"] = _fabric(run, tied)
    results["no-kernels"] = _fit(run, LM(), strategy=LigerModelParallelStrategy(kernels="none"))
    recompute = LigerModelParallelStrategy(activation_checkpointing_policy=["LlamaDecoderLayer"])
    results["recomputed"] = _fit(run, CountsForwards(), strategy=recompute)
    # The head among them, whose weight the loss needs after the head has run.
    results["each-linear"] = _fit(run, LM(), strategy=LigerModelParallelStrategy(auto_wrap_policy=["Linear"]))
    results["by-its-user"] = _fit(run, ShardedByItsUser())
    results["uneven"] = _fit(run, AddsToLoss(), make_uneven_batches, accumulate_grad_batches=2)
    results["clipped"] = _fit(run, LM(), gradient_clip_val=MAX_NORM)
    torch.save(results, folder / f"rank{run['rank']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
