"""The worker that trains the tiny model with DDP on two processes in every way that the tests compare.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch``.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_liger import FabricLigerDDPStrategy, LigerDDPStrategy
from tests.lightning_liger.strategies.workers.distributed import (
    HEADS,
    LM,
    NUM_RANKS,
    Batch,
    Losses,
    build_model,
    logit_counts,
    make_batches,
    make_optimizer,
    make_trainer,
    outside_loss,
)

NUM_STEPS = 6


class OwnStep(LM):
    """The step that users write without the mixin."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(**batch).loss


def _with_unused_parameters(model: nn.Module) -> None:
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))


def _with_frozen_backbone(model: nn.Module) -> None:
    model.model.requires_grad_(False)


def _nothing(model: nn.Module) -> None:
    return None


def loss_of_labels(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def loss_of_logits(model: nn.Module, batch: Batch) -> Tensor:
    return outside_loss(model(batch["input_ids"]).logits, batch["labels"])


def _describe(model: nn.Module, losses: list[float], strategy: Any) -> dict[str, Any]:
    parameters = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    report = getattr(strategy, "patch_report", None)
    return {
        "losses": losses,
        "parameters": parameters,
        "num_replaced": 0 if report is None else report.num_replaced,
        "logit_counts": logit_counts(model),
    }


def _fit(
    strategy: Any, module: LM, run: dict[str, Any], make: Callable[..., list[Batch]] = make_batches, **options: Any
) -> dict[str, Any]:
    recorder = Losses()
    trainer = make_trainer(
        recorder, root=run["folder"], strategy=strategy, accelerator=run["accelerator"], devices=NUM_RANKS, **options
    )
    trainer.fit(module, DataLoader(make(run["rank"], NUM_STEPS), batch_size=None))
    return _describe(module, recorder.losses, trainer.strategy)


def _fabric(
    strategy: Any,
    loss_of: Callable[[nn.Module, Batch], Tensor],
    run: dict[str, Any],
    tied: bool = False,
    change: Callable[[nn.Module], None] = _nothing,
) -> dict[str, Any]:
    fabric = L.Fabric(strategy=strategy, accelerator=run["accelerator"], devices=NUM_RANKS)
    fabric.launch()
    inner = build_model(tied)
    change(inner)
    optimizer = make_optimizer([parameter for parameter in inner.parameters() if parameter.requires_grad])
    model, optimizer = fabric.setup(inner, optimizer)
    losses = []
    for batch in make_batches(run["rank"], NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, {name: tensor.to(fabric.device) for name, tensor in batch.items()})
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return _describe(inner, losses, fabric.strategy)


def _run_rank(device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    run = {"rank": int(os.environ["RANK"]), "folder": folder, "accelerator": {"cuda": "gpu"}.get(device, device)}
    results: dict[str, Any] = {}
    for head, tied in HEADS.items():
        results[f"trainer-{head}"] = {
            "stock": _fit(DDPStrategy(), LM(tied), run),
            "name": _fit("liger_ddp", LM(tied), run),
            "find-unused": _fit("liger_ddp_find_unused_parameters_true", LM(tied), run),
            "static-graph": _fit(LigerDDPStrategy(static_graph=True), LM(tied), run),
        }
        results[f"trainer-own-step-{head}"] = {
            "stock": _fit(DDPStrategy(), OwnStep(tied), run),
            "name": _fit("liger_ddp", OwnStep(tied), run),
            "find-unused": _fit("liger_ddp_find_unused_parameters_true", OwnStep(tied), run),
        }
        results[f"fabric-{head}"] = {
            "stock": _fabric(FabricDDPStrategy(), loss_of_logits, run, tied),
            "labels": _fabric("liger_ddp", loss_of_labels, run, tied),
            "logits": _fabric("liger_ddp", loss_of_logits, run, tied),
            "find-unused": _fabric("liger_ddp_find_unused_parameters_true", loss_of_logits, run, tied),
            "static-graph": _fabric(FabricLigerDDPStrategy(static_graph=True), loss_of_logits, run, tied),
        }
    for name, change in (("unused", _with_unused_parameters), ("frozen", _with_frozen_backbone)):
        unused = {"find_unused_parameters": True}
        results[f"fabric-{name}"] = {
            "stock": _fabric(FabricDDPStrategy(**unused), loss_of_logits, run, change=change),
            "labels": _fabric(FabricLigerDDPStrategy(**unused), loss_of_labels, run, change=change),
            "logits": _fabric(FabricLigerDDPStrategy(**unused), loss_of_logits, run, change=change),
        }
    torch.save(results, folder / f"rank{run['rank']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
