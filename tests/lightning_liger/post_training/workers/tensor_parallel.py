"""The worker that trains modules of post-training on two tensor-parallel ranks.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader

from lightning_liger import (
    LigerDistillation,
    LigerDPO,
    LigerGRPO,
    LigerKTO,
    LigerModelParallelStrategy,
)
from tests.lightning_liger.post_training.completion_batches import apart
from tests.lightning_liger.post_training.completion_batches import sequences as completions
from tests.lightning_liger.post_training.preference_data import packed, padded, sequences
from tests.lightning_liger.tiny import tiny_batch

Batches = list[dict[str, Any]]


def _pairs(make: Callable[..., dict[str, Any]]) -> Batches:
    return [make(sequences(4, seed=seed)) for seed in range(2)]


def _labelled() -> Batches:
    return [
        {**padded(sequences(2, seed=seed)), **padded(sequences(2, seed=seed + 5), prefix="KL_"), "label": label}
        for seed, label in enumerate((torch.tensor([True, False]), torch.tensor([False, True])))
    ]


def _groups() -> Batches:
    return [apart(completions(4, columns=("old_per_token_logps",), seed=seed)) for seed in range(2)]


def _rollouts() -> Batches:
    columns = {"old_per_token_logps": torch.full((2, 11), -3.0)}
    return [{**tiny_batch(seed=seed), **columns} for seed in range(2)]


def _in_both_tokens() -> Batches:
    return [
        batch | {f"teacher_{name}": batch[name] for name in ("input_ids", "labels")} for batch in map(dict, _rollouts())
    ]


RUNS: dict[str, tuple[Callable[..., L.LightningModule], dict[str, Any], Callable[[], Batches]]] = {
    "dpo": (LigerDPO, {"use_weighting": True}, lambda: _pairs(padded)),
    "dpo-packed": (LigerDPO, {"loss_type": ["sigmoid", "sft"]}, lambda: _pairs(packed)),
    "kto": (LigerKTO, {}, _labelled),
    "grpo": (LigerGRPO, {"beta": 0.5, "entropy_coef": 0.1}, _groups),
    "gspo": (LigerGRPO, {"importance_sampling_level": "sequence", "top_entropy_quantile": 0.5}, _groups),
    "full_logits": (LigerDistillation, {"divergence": "jsd", "crossentropy_weight": 0.5}, _rollouts),
    "sampled_token": (LigerDistillation, {"distillation_mode": "sampled_token"}, _rollouts),
    "topk_logits": (LigerDistillation, {"distillation_mode": "topk_logits", "distillation_topk": 5}, _rollouts),
    "uld": (LigerDistillation, {"distillation_mode": "uld"}, _in_both_tokens),
}


def train(name: str, strategy: str | Strategy, folder: Path) -> dict[str, Any]:
    """The losses of two steps and the whole model after them."""
    make, options, batches = RUNS[name]
    teacher = {"teacher": str(folder / "teacher")} if make is LigerDistillation else {}
    module = make(pretrained=str(folder / "model"), learning_rate=0.01, min_lr_ratio=1.0, **options, **teacher)
    devices = 1 if strategy == "liger" else 2
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(module, DataLoader(batches(), batch_size=None))
    path = folder / f"{name}-{devices}.ckpt"
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    state = torch.load(path, weights_only=True)["state_dict"]
    return {
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "model": {key: value for key, value in state.items() if key.startswith("model.")},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, results = Path(sys.argv[2]), {}
    for name in RUNS:
        strategy = LigerModelParallelStrategy(tensor_parallel_size=2, save_distributed_checkpoint=False)
        results[name] = train(name, strategy, out)
    torch.save(results, out / f"rank{os.environ['RANK']}.pt")
