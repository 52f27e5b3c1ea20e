"""The worker that trains policies on two ranks in every way that ``test_policy_ranks.py`` compares.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lightning_liger import LigerDDPStrategy
from lightning_liger.losses.policy_options import PolicyOptions
from tests.lightning_liger.post_training.completion_batches import Batch, Policy, apart, joined, packed, sequences
from tests.lightning_liger.strategies.workers.distributed import make_trainer

COLUMNS = ("old_per_token_logps",)


class Run(NamedTuple):
    """What is trained on; with ``context_parallel_size`` both ranks have the same rows."""

    options: PolicyOptions
    micro_batches: tuple[tuple[slice, slice], ...]
    """Of each micro-batch the sequences of both ranks."""
    context_parallel_size: int = 1
    is_packed: bool = False


WHOLE = slice(0, 6)
RUNS = {
    "sequences": Run(
        PolicyOptions(loss_type="grpo", importance_sampling_level="sequence", entropy_coef=0.05),
        ((slice(0, 1), slice(1, 3)), (slice(3, 5), slice(5, 6))),
    ),
    "entropy mask": Run(PolicyOptions(top_entropy_quantile=0.5), ((slice(0, 2), slice(2, 6)),)),
    "context": Run(PolicyOptions(loss_type="dapo", entropy_coef=0.05), ((WHOLE, WHOLE),), 2),
    "context packed": Run(
        PolicyOptions(loss_type="grpo", importance_sampling_level="sequence", entropy_coef=0.05),
        ((WHOLE, WHOLE),),
        2,
        is_packed=True,
    ),
}


def even(batch: Batch) -> Batch:
    """Rows of an even length; padding of packed rows has no sequence."""
    length = batch["input_ids"].shape[1]
    if length % 2 == 0:
        return batch
    fill = {"sequence_ids": -1}
    return {
        key: torch.nn.functional.pad(value, (0, 1), value=fill.get(key, 0))
        if isinstance(value, torch.Tensor) and value.ndim == 2
        else value
        for key, value in batch.items()
    }


def train(run: Run, rank: int, folder: Path) -> dict[str, Any]:
    examples = sequences(6, columns=COLUMNS)
    module = Policy(run.options)
    module.configure_model()
    module.model.set_attn_implementation("sdpa")
    module.model.config.use_cache = False
    batches = []
    for slices in run.micro_batches:
        part = examples[slices[rank]]
        batches.append(
            apart(part) if run.context_parallel_size == 1 else even((packed if run.is_packed else joined)(part))
        )
    trainer = make_trainer(
        root=folder,
        strategy=LigerDDPStrategy(context_parallel_size=run.context_parallel_size),
        devices=2,
        accumulate_grad_batches=len(batches),
    )
    trainer.fit(module, DataLoader(batches, batch_size=None, shuffle=False))  # type: ignore[arg-type]
    return {
        "weights": {name: parameter.detach() for name, parameter in module.model.named_parameters()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


if __name__ == "__main__":
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.save({name: train(run, rank, folder) for name, run in RUNS.items()}, folder / f"rank{rank}.pt")
