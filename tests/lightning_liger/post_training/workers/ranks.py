"""The worker that trains modules of post-training on two processes under each strategy.

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
from torch import Tensor, nn

from lightning_liger import (
    LigerDDPStrategy,
    LigerDeepSpeedStrategy,
    LigerDistillation,
    LigerDPO,
    LigerFSDPStrategy,
    LigerGRPO,
    LigerKTO,
    LigerMedusa,
    LigerModelParallelStrategy,
)
from tests.lightning_liger.post_training import completion_batches as completions
from tests.lightning_liger.post_training.preference_data import packed, padded, sequences
from tests.lightning_liger.post_training.training import Recorded, fit, metrics_of
from tests.lightning_liger.strategies.workers.distributed import skip_shared_memory_op
from tests.lightning_liger.tiny import tiny_batch

Batches = list[dict[str, Any]]
SIZES = ((1, 2, 2, 1), (3, 1, 1, 2))
"""Of the micro-batches of each rank; two of each rank are one step."""
_ZERO = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 3}}
_ZERO["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # type: ignore[index]
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": LigerDDPStrategy,
    "fsdp": lambda: LigerFSDPStrategy(state_dict_type="full"),
    "model_parallel": lambda: LigerModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False
    ),
    "context_parallel": lambda: LigerDDPStrategy(context_parallel_size=2),
    "tensor_parallel": lambda: LigerModelParallelStrategy(tensor_parallel_size=2, save_distributed_checkpoint=False),
    "deepspeed": lambda: LigerDeepSpeedStrategy(config=_ZERO),
}
SHARES_BATCHES = ("context_parallel", "tensor_parallel")
"""Strategies under which both ranks get the same batches."""


def pairs(ranks: list[int], make: Callable[..., Any] = padded, **width: int) -> Batches:
    return [
        make(sequences(2 * n, seed=10 * rank + index), **width) for rank in ranks for index, n in enumerate(SIZES[rank])
    ]


def labeled(ranks: list[int]) -> Batches:
    found = []
    for batch, other in zip(pairs(ranks), pairs(ranks), strict=True):
        mismatched = {f"KL_{key}": value.roll(1, 0) for key, value in other.items()}
        found.append(batch | mismatched | {"label": torch.arange(len(batch["input_ids"])) % 2 == 0})
    return found


def groups(ranks: list[int], make: Callable[..., Any] = completions.apart) -> Batches:
    examples = completions.sequences(6, columns=("old_per_token_logps",))
    parts = [[slice(0, 1), slice(3, 5)], [slice(1, 3), slice(5, 6)]]
    return [make(examples[part]) for rank in ranks for _ in range(2) for part in parts[rank]]


def whole_groups(ranks: list[int], make: Callable[..., Any] = completions.apart) -> Batches:
    """In one micro-batch, whose entropies are ranked over both ranks."""
    examples = completions.sequences(6, columns=("old_per_token_logps",))
    part = slice(0, 6) if len(ranks) == 2 else (slice(0, 2), slice(2, 6))[ranks[0]]
    return [even(make(examples[part]))] * 2


def even(batch: dict[str, Any]) -> dict[str, Any]:
    """Rows of an even length; padding of packed rows has no sequence."""
    if "input_ids" not in batch or batch["input_ids"].shape[1] % 2 == 0:
        return batch
    rows = {key: value for key, value in batch.items() if isinstance(value, Tensor) and value.ndim == 2}
    pad = torch.nn.functional.pad
    return batch | {key: pad(value, (0, 1), value=-(key == "sequence_ids")) for key, value in rows.items()}


def texts(ranks: list[int]) -> Batches:
    ignored = ((9, 0, 2, 5), (3, 6, 1, 0))
    return [tiny_batch(2, 12, number, seed=10 * rank + i) for rank in ranks for i, number in enumerate(ignored[rank])]


def rollouts(ranks: list[int]) -> Batches:
    return [batch | {"old_per_token_logps": torch.full((2, 12), -3.0)} for batch in texts(ranks)]


def in_both_tokens(ranks: list[int]) -> Batches:
    return [batch | {f"teacher_{name}": batch[name] for name in ("input_ids", "labels")} for batch in texts(ranks)]


SFT = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.3}
SEQUENCES = {"loss_type": "grpo", "importance_sampling_level": "sequence", "entropy_coef": 0.05}
TOPK = {"distillation_mode": "topk_logits", "distillation_topk": 5}
HEADS = {"medusa_num_heads": 2}
JOINT = HEADS | {"medusa_only_heads": False}
Run = tuple[type[L.LightningModule], dict[str, Any], Callable[[list[int]], Batches]]
DPO: Run = LigerDPO, SFT, lambda ranks: pairs(ranks, width=16)
STUDENT: Run = LigerDistillation, {}, texts
RUNS: dict[str, dict[str, Run]] = {
    "ddp": {
        "dpo": DPO,
        "policy": (LigerGRPO, SEQUENCES, groups),
        "entropy mask": (LigerGRPO, {"top_entropy_quantile": 0.5}, whole_groups),
        "heads": (LigerMedusa, HEADS, texts),
    },
    "fsdp": {"dpo": DPO, "student": STUDENT, "joint": (LigerMedusa, JOINT, texts)},
    "model_parallel": {
        "dpo": DPO,
        "student": STUDENT,
        "shared": (LigerMedusa, HEADS | {"medusa_shared_head": True}, texts),
        "heads": (LigerMedusa, HEADS, texts),
    },
    "context_parallel": {
        "dpo": DPO,
        "policy": (LigerGRPO, {"entropy_coef": 0.05}, lambda ranks: whole_groups(ranks, completions.joined)),
        "policy packed": (LigerGRPO, SEQUENCES, lambda ranks: whole_groups(ranks, completions.packed)),
        "topk": (LigerDistillation, TOPK, texts),
        "joint": (LigerMedusa, JOINT, texts),
    },
    "tensor_parallel": {
        "weighted": (LigerDPO, {"use_weighting": True}, pairs),
        "packed": (LigerDPO, SFT, lambda ranks: pairs(ranks, packed)),
        "kto": (LigerKTO, {}, labeled),
        "policy": (LigerGRPO, {"beta": 0.5, "entropy_coef": 0.1}, groups),
        "sequences": (LigerGRPO, SEQUENCES | {"top_entropy_quantile": 0.5}, groups),
        "student": (LigerDistillation, {"divergence": "jsd", "crossentropy_weight": 0.5}, texts),
        "sampled": (LigerDistillation, {"distillation_mode": "sampled_token"}, rollouts),
        "topk": (LigerDistillation, TOPK, texts),
        "uld": (LigerDistillation, {"distillation_mode": "uld"}, in_both_tokens),
    },
    "deepspeed": {
        "dpo": DPO,
        "student": STUDENT,
        "joint": (LigerMedusa, JOINT, texts),
        "heads": (LigerMedusa, HEADS, texts),
    },
}


def train(run: Run, strategy: str, ranks: list[int], folder: Path, **others: Any) -> dict[str, Any]:
    """Two steps of plain SGD, which shows the scale of gradients, and the whole model after them."""
    make, options, batches_of = run

    class Module(make):  # type: ignore[valid-type, misc]
        learning_rate = 0.1
        configure_optimizers = Recorded.configure_optimizers

    if make is LigerDistillation:
        is_sharded = strategy in ("fsdp", "model_parallel")
        options = options | {"teacher": str(folder / "teacher"), "shard_teacher": is_sharded}
    module = Module(pretrained=str(folder / "model"), **options)
    is_alone = strategy == "liger"
    found = batches_of(ranks)
    if is_alone and len(ranks) == 2 and len(found) > 2:  # step by step, not rank by rank
        half = len(found) // 2
        found = [*found[: half // 2], *found[half : half + half // 2], *found[half // 2 : half], *found[-half // 2 :]]
    trainer = fit(
        module, found, devices=1 if is_alone else 2, strategy="liger" if is_alone else STRATEGIES[strategy](),
        use_distributed_sampler=False, accumulate_grad_batches=len(found) // 2, **others,
    )  # fmt: skip
    return {"metrics": metrics_of(trainer), "state": state_of(module, trainer, strategy, folder)}


def state_of(module: nn.Module, trainer: L.Trainer, strategy: str, folder: Path) -> dict[str, Tensor]:
    if strategy == "deepspeed":  # whose checkpoints are folders
        import deepspeed

        parameters = {name: each for name, each in module.named_parameters() if not name.startswith("ref_model")}
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return {name: each.detach().clone() for name, each in parameters.items()}
    trainer.save_checkpoint(folder / f"{strategy}.ckpt")
    trainer.strategy.barrier()
    state = dict(torch.load(folder / f"{strategy}.ckpt", weights_only=True)["state_dict"])
    trainer.strategy.barrier()
    return state


if __name__ == "__main__":
    torch.set_num_threads(1)
    skip_shared_memory_op()
    out, rank = Path(sys.argv[2]), int(os.environ["RANK"])
    results = {
        strategy: {
            name: train(run, strategy, [0] if strategy in SHARES_BATCHES else [rank], out) for name, run in runs.items()
        }
        for strategy, runs in RUNS.items()
        if strategy in (sys.argv[3:] or RUNS)
    }
    torch.save(results, out / f"rank{rank}.pt")
