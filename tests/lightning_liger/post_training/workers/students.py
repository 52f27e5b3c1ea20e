"""The worker that trains students and Medusa heads on two processes under each strategy.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from lightning_liger import (
    DistillationOptions,
    LigerDistillationMixin,
    LigerMedusaMixin,
    MedusaHeads,
)
from tests.lightning_liger.post_training.workers.strategies import strategy_of
from tests.lightning_liger.tiny import tiny_batch, tiny_model

RUNS = {
    "ddp": ("heads",),
    "fsdp": ("student", "joint"),
    "model_parallel": ("student", "shared", "heads"),
    "context_parallel": ("topk", "joint"),
    "deepspeed": ("student", "joint", "heads"),
}
IGNORED = ((9, 0), (3, 6))
"""Labels that are ignored in the first row, for the micro-batches of each rank: all are one step."""


class Student(LigerDistillationMixin, L.LightningModule):
    def __init__(self, folder: Path, mode: str, is_sharded: bool) -> None:
        top_k = {"distillation_topk": 5} if mode == "topk_logits" else {}
        self.distillation = DistillationOptions(distillation_mode=mode, **top_k)
        self.shard_teacher = is_sharded
        super().__init__()
        self.folder = folder
        self.model: nn.Module

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            self.model = LlamaForCausalLM.from_pretrained(self.folder / "model")  # ZeRO-3 partitions it

    def configure_teacher(self) -> nn.Module:
        return tiny_model("qwen2", hidden_size=48)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


class Medusa(LigerMedusaMixin, L.LightningModule):
    def __init__(self, folder: Path, only_heads: bool, shared: bool) -> None:
        self.medusa_only_heads = only_heads
        super().__init__()
        self.folder, self.shared = folder, shared
        self.model: nn.Module

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            self.model = LlamaForCausalLM.from_pretrained(self.folder / "model")
            self.model.requires_grad_(not self.medusa_only_heads)
            self.medusa_heads = MedusaHeads.of(self.model, 2, shared_head=self.shared)

    configure_optimizers = Student.configure_optimizers


def module_of(name: str, strategy: str, folder: Path) -> Any:
    if name in ("student", "topk"):
        mode = {"student": "full_logits", "topk": "topk_logits"}[name]
        return Student(folder, mode, is_sharded=strategy in ("fsdp", "model_parallel"))
    return Medusa(folder, only_heads=name == "heads", shared=name == "shared")


def batches_of(rank: int) -> list[dict[str, Tensor]]:
    return [tiny_batch(2, 12, num_ignored, seed=10 * rank + i) for i, num_ignored in enumerate(IGNORED[rank])]


def whole(module: nn.Module) -> dict[str, Tensor]:
    """The model's and the heads' parameters where no engine has sharded them by itself."""
    import deepspeed

    parameters = dict(module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: each.detach().clone() for name, each in parameters.items()}


def train(name: str, strategy: str, folder: Path) -> dict[str, Any]:
    rank, module = int(os.environ["RANK"]), module_of(name, strategy, folder)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy_of(strategy), max_epochs=1, logger=False,
        use_distributed_sampler=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=2,
    )  # fmt: skip
    data = batches_of(0 if strategy == "context_parallel" else rank)
    trainer.fit(module, DataLoader(data, batch_size=None))
    path = folder / f"{name}-{strategy}.ckpt"
    if strategy == "deepspeed":
        state = whole(module)
    else:
        trainer.save_checkpoint(path)
        trainer.strategy.barrier()
        state = dict(torch.load(path, weights_only=True, mmap=True)["state_dict"])
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"metrics": metrics, "state": state}


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = Path(sys.argv[2])
    chosen = [(name, strategy) for strategy, names in RUNS.items() for name in names]
    if len(sys.argv) > 3:
        chosen = [each for each in chosen if each[1] in sys.argv[3:]]
    results = {f"{name}-{strategy}": train(name, strategy, out) for name, strategy in chosen}
    torch.save(results, out / f"rank{os.environ['RANK']}.pt")
