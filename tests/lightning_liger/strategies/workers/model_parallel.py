"""Trainings that only ``liger_model_parallel`` has, and Fabric's, as ``test_model_parallel.py`` compares them."""

from collections.abc import Callable
from typing import Any

import lightning as L
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_liger import LigerModelParallelStrategy
from tests.lightning_liger.strategies.workers.clipping import whole_parameters
from tests.lightning_liger.strategies.workers.distributed import (
    HEADS,
    NUM_RANKS,
    build_model,
    logit_counts,
    make_batches,
    make_optimizer,
    make_uneven_batches,
)
from tests.lightning_liger.strategies.workers.engines import fit
from tests.lightning_liger.strategies.workers.frozen import MAX_NORM, NUM_BATCHES, NUM_MICRO_BATCHES, Changed


class ShardedByItsUser(Changed):
    """Shards another way than the strategy would, in ``configure_model``."""

    def configure_model(self) -> None:
        if getattr(self, "model", None) is not None:
            return
        super().configure_model()
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer.mlp, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class CountsForwards(Changed):
    """Counts how often the MLP of the first layer runs."""

    num_forwards = 0

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            super().configure_model()
            self.model.model.layers[0].mlp.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, args: Any) -> None:
        self.num_forwards += 1


WAYS: dict[str, tuple[dict[str, Any], Callable[[str], Changed]]] = {
    "usual": ({}, Changed),
    "no-kernels": ({"kernels": "none"}, Changed),
    "recomputed": ({"activation_checkpointing_policy": ["LlamaDecoderLayer"]}, CountsForwards),
    # The head among them, whose weight the loss needs after the head has run.
    "each-linear": ({"auto_wrap_policy": ["Linear"]}, Changed),
    "by-its-user": ({}, ShardedByItsUser),
}


def results(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a rank got out of each of ``WAYS``, and of Fabric."""
    found = {}
    for way, (arguments, make) in WAYS.items():
        module, batches = make("whole"), make_uneven_batches(run["rank"], NUM_BATCHES)
        options = {"accumulate_grad_batches": NUM_MICRO_BATCHES, "gradient_clip_val": MAX_NORM}
        result = fit(run, LigerModelParallelStrategy(**arguments), module, batches, **options)
        trainer = result["trainer"]
        result["num_replaced"] = trainer.strategy.patch_report.num_replaced
        result["units"] = sorted(type(part).__name__ for part in module.modules() if isinstance(part, FSDPModule))
        result["num_forwards"] = getattr(module, "num_forwards", None)
        (result["validation"],) = trainer.validate(module, DataLoader(batches, batch_size=None), verbose=False)
        result["counts_after_validation"] = logit_counts(module)
        found[f"fsdp2-{way}"] = result
    return found | {f"fsdp2-fabric-{head}": _fabric(run, tied) for head, tied in HEADS.items()}


def _fabric(run: dict[str, Any], tied: bool) -> dict[str, Any]:
    fabric = L.Fabric(strategy="liger_model_parallel", accelerator=run["accelerator"], devices=NUM_RANKS)
    fabric.launch()
    model = fabric.setup_module(build_model(tied))
    optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
    losses, norms = [], []
    for batch in make_batches(run["rank"], NUM_BATCHES):
        optimizer.zero_grad()
        loss = model(**{name: tensor.to(fabric.device) for name, tensor in batch.items()}).loss
        fabric.backward(loss)
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM).full_tensor().item())
        optimizer.step()
        losses.append(loss.item())
    num_replaced = fabric.strategy.patch_report.num_replaced
    return {
        **{"losses": losses, "norms": norms, "num_replaced": num_replaced, "logit_counts": logit_counts(model)},
        "whole": whole_parameters(model.module),
    }
