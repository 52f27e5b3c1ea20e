"""Trainings on four ranks, which may share sequences, that ``test_shared_sequences.py`` compares with one process."""

import re
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_liger import (
    LigerDDPStrategy,
    LigerLMMixin,
    LigerModelParallelStrategy,
    LigerStrategy,
    shift_labels,
)
from tests.lightning_liger.strategies.workers.distributed import ROOT, logit_counts, make_optimizer
from tests.lightning_liger.strategies.workers.trainings import fit, rank_main
from tests.lightning_liger.tiny import VOCAB_SIZE, tiny_model

NUM_STEPS = 5
NUM_MICRO_BATCHES = 2
BATCH_SIZE = 2
SEQ_LEN = 16
MAX_NORM = 0.5

Batch = dict[str, Tensor]


class Run(NamedTuple):
    """What is trained, and how many ranks share a sequence: 0 stands for all."""

    strategy: type
    size: int = 0
    architecture: str = "llama"
    is_packed: bool = False
    config: dict[str, Any] = {}
    strategy_options: dict[str, Any] = {}
    num_micro_batches: int = 1


WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
RUNS = {
    "ddp": Run(LigerDDPStrategy),
    "ddp-groups-packed": Run(LigerDDPStrategy, 2, "gemma2", is_packed=True, config=WINDOWS),
    "fsdp-checkpointed": Run(
        LigerStrategy,
        config={"num_key_value_heads": 1},
        strategy_options={"activation_checkpointing_policy": ["LlamaDecoderLayer"]},
    ),
    "fsdp-hybrid-groups-packed": Run(
        LigerStrategy,
        size=2,
        is_packed=True,
        strategy_options={"sharding_strategy": "HYBRID_SHARD"},
        num_micro_batches=NUM_MICRO_BATCHES,
    ),
    # Rows are whole: two groups of two ranks that shard parameters.
    "hybrid": Run(LigerStrategy, size=1, strategy_options={"sharding_strategy": "HYBRID_SHARD"}),
    "hybrid-process-groups": Run(LigerStrategy, size=1, strategy_options={"sharding_strategy": "_HYBRID_SHARD_ZERO2"}),
    "model-parallel-packed": Run(LigerModelParallelStrategy, is_packed=True),
    "model-parallel-groups": Run(LigerModelParallelStrategy, 2, "mistral", config={"sliding_window": 3}),
}
LOOP_OF_THE_PAGE = Run(LigerDDPStrategy, size=2)


def build_model(run: Run) -> nn.Module:
    with torch.device("cpu"):  # GPUs draw other numbers
        model = tiny_model(run.architecture, **run.config)
    for parameter in model.parameters():  # near to where training starts: it moves parameters little otherwise
        parameter.data.mul_(0.5)
    if run.architecture != "gemma2":  # which has eager attention only
        model.set_attn_implementation("sdpa")
    model.config.use_cache = False
    return model.train()


def make_rows(run: Run, num_groups: int) -> list[Batch]:
    """All rows of all steps: in every second, the last half has no labels, and the first has a few ignored ones."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(NUM_STEPS * run.num_micro_batches * BATCH_SIZE * num_groups):
        input_ids = torch.randint(3, VOCAB_SIZE, (SEQ_LEN,), generator=generator)
        labels = input_ids.clone()
        labels[2:5] = -100
        if index % 2:
            labels[SEQ_LEN // 2 :] = -100
        row = {"input_ids": input_ids, "labels": labels}
        if run.is_packed:  # the second document lies on several ranks, the third starts where a rank's piece may
            row["position_ids"] = torch.cat([torch.arange(length) for length in (3, SEQ_LEN // 2 - 3, SEQ_LEN // 2)])
            if index % 2:
                row["position_ids"] = torch.cat([torch.arange(length) for length in (SEQ_LEN - 5, 5)])
        rows.append(row)
    return rows


def group_size(run: Run, num_ranks: int) -> int:
    return run.size or num_ranks


class LM(LigerLMMixin, L.LightningModule):
    """Keeps the logged loss of each step and the lengths of rows that the model got."""

    def __init__(self, run: Run, rows: list[Batch] | None = None) -> None:
        super().__init__()
        self.run, self.rows = run, rows
        self.logged: list[float] = []
        self.lengths: set[int] = set()

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            self.model = build_model(self.run)
            self.model.register_forward_pre_hook(self._note_length, with_kwargs=True)

    def _note_length(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.lengths.add(kwargs["input_ids"].shape[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters())

    def train_dataloader(self) -> DataLoader[Batch]:
        # In order, which the sampler that Lightning adds would not be.
        sampler = DistributedSampler(self.rows, **self.trainer.distributed_sampler_kwargs, shuffle=False)
        return DataLoader(self.rows, batch_size=BATCH_SIZE, sampler=sampler)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.run.num_micro_batches == 0:
            self.logged.append(self.trainer.callback_metrics["train_loss_step"].item())

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"]).logits


def _fit(run: Run, ranks: dict[str, Any]) -> dict[str, Any]:
    num_ranks = ranks["size"]
    size = group_size(run, num_ranks)
    rows = make_rows(run, num_ranks // size)
    options = dict(run.strategy_options)
    if options.get("sharding_strategy") == "HYBRID_SHARD":
        options["device_mesh"] = (num_ranks // 2, 2)
    if options.get("sharding_strategy") == "_HYBRID_SHARD_ZERO2":
        options["process_group"] = _make_groups(ranks["rank"])
    module = LM(run, rows)
    result = fit(
        ranks,
        run.strategy(context_parallel_size=size, **options),
        module,
        None,
        use_distributed_sampler=True,
        accumulate_grad_batches=run.num_micro_batches,
        gradient_clip_val=MAX_NORM,
    )
    result |= {"logged": module.logged, "lengths": module.lengths}
    loader = DataLoader(rows, batch_size=BATCH_SIZE)
    (result["validation"],) = result["trainer"].validate(module, loader, verbose=False)
    return result


def _make_groups(rank: int) -> tuple[Any, Any]:
    """Groups of two of four ranks that shard, and those that replicate, this rank's of each, as a mesh has them."""
    shards = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replicas = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return shards[rank // 2], replicas[rank % 2]


def _predict_after_fit(ranks: dict[str, Any]) -> dict[str, Any]:
    """Rows stay whole in ``predict``, also with a module that was trained on pieces."""
    module = LM(RUNS["ddp"])
    rows = make_rows(module.run, 1)[:BATCH_SIZE]
    strategy = LigerDDPStrategy(context_parallel_size=ranks["size"])
    loader = DataLoader(rows, batch_size=BATCH_SIZE)
    trainer = fit(ranks, strategy, module, list(loader), max_steps=1)["trainer"]
    (logits,) = trainer.predict(module, loader)
    found = {"logits": logits.cpu(), "implementation": module.model.config._attn_implementation}
    trainer.validate(module, loader, verbose=False)
    return {**found, "state": {name: tensor.cpu() for name, tensor in module.model.state_dict().items()}}


def _different_rows(ranks: dict[str, Any]) -> dict[str, Any]:
    """What is said if ranks that share sequences have their own rows each."""
    rows = make_rows(RUNS["ddp"], ranks["size"])[ranks["rank"] :]
    strategy, loader = LigerDDPStrategy(context_parallel_size=ranks["size"]), DataLoader(rows, batch_size=1)
    return fit(ranks, strategy, LM(RUNS["ddp"]), list(loader), may_fail=True)


def _fabric(device: str, num_ranks: int) -> dict[str, Any]:
    """The loop that is printed in docs/sequences.md."""
    run = LOOP_OF_THE_PAGE
    page = (ROOT / "docs" / "sequences.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n([^`]*def train.*?)```", page, flags=re.DOTALL)
    scope: dict[str, Any] = {}
    exec(block, scope)
    fabric = L.Fabric(strategy="liger_ddp", accelerator={"cuda": "gpu"}.get(device, device), devices=num_ranks)
    fabric.launch()
    model, num_groups = build_model(run), num_ranks // run.size
    rows = make_rows(run, num_groups)[fabric.global_rank // run.size :: num_groups]
    loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=BATCH_SIZE), use_distributed_sampler=False)
    scope["train"](fabric, model, make_optimizer(model.parameters()), loader)
    whole = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return {"whole": whole, "logit_counts": logit_counts(model)}


def reference(run: Run, num_groups: int, device: str, max_norm: float = MAX_NORM) -> dict[str, Any]:
    """One process, stock model, whole rows of all groups, plain loop."""
    model = build_model(run).to(device)
    optimizer = make_optimizer(model.parameters())
    losses, counts = [], []
    per_step = run.num_micro_batches * BATCH_SIZE * num_groups
    for rows in DataLoader(make_rows(run, num_groups), batch_size=per_step):
        batch = {name: tensor.to(device) for name, tensor in rows.items()}
        targets = shift_labels(batch.pop("labels"), batch.get("position_ids"))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(**batch).logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
        counts.append(int((targets != -100).sum()))
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    whole = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return {"losses": losses, "mean": mean, "whole": whole, "model": model}


def results(ranks: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: _fit(run, ranks) for name, run in RUNS.items()},
        "fabric": _fabric(ranks["device"], ranks["size"]),
        "predict": _predict_after_fit(ranks),
        "different-rows": _different_rows(ranks),
    }


if __name__ == "__main__":
    rank_main(results)
