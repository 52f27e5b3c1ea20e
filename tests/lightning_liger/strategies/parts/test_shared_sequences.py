"""Sequences split over ranks: the same losses and parameters as one process with whole ones and the stock model."""

import re
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_liger import ContextParallel, LigerDDPStrategy, LigerModelParallelStrategy, LigerStrategy
from lightning_liger.sequences.context_parallel import attention_implementation
from tests.lightning_liger.architectures import tiny_causal_lm
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    NUM_RANKS,
    ROOT,
    logit_counts,
    make_optimizer,
    make_trainer,
)
from tests.lightning_liger.strategies.workers.trainings import (
    TOLERANCE,
    Reference,
    assert_same_parameters,
    assert_trained_as,
    fit,
    rank_main,
    reference_training,
    whole_parameters,
)
from tests.lightning_liger.tiny import VOCAB_SIZE, tiny_model

NUM_STEPS = 5
NUM_MICRO_BATCHES = 2
BATCH_SIZE = 2
SEQ_LEN = 16
MAX_NORM = 0.5

Batch = dict[str, Tensor]


class Run(NamedTuple):
    """What is trained, and how many ranks share a sequence: 0 stands for all."""

    make: Any
    size: int = 0
    architecture: str = "llama"
    is_packed: bool = False
    config: dict[str, Any] = {}
    num_micro_batches: int = 1


def _on_mesh(**options: Any) -> LigerStrategy:
    mesh = (torch.distributed.get_world_size() // 2, 2) if torch.distributed.is_initialized() else (2, 2)
    return LigerStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=mesh, **options)


WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
RUNS = {
    "ddp": Run(LigerDDPStrategy),
    "ddp-groups-packed": Run(LigerDDPStrategy, 2, "gemma2", is_packed=True, config=WINDOWS),
    "fsdp-checkpointed": Run(
        partial(LigerStrategy, activation_checkpointing_policy=["LlamaDecoderLayer"]), config={"num_key_value_heads": 1}
    ),
    "fsdp-hybrid-groups-packed": Run(_on_mesh, 2, is_packed=True, num_micro_batches=NUM_MICRO_BATCHES),
    # Rows are whole: two groups of two ranks that shard parameters.
    "hybrid": Run(_on_mesh, 1),
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


class OfRun(LM):
    """Keeps the logged loss of each step and the lengths of rows that the model got."""

    def __init__(self, run: Run, rows: list[Batch] | None = None) -> None:
        super().__init__(build=lambda module: build_model(run))
        self.run, self.rows = run, rows
        self.logged: list[float] = []
        self.lengths: set[int] = set()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        noting = self.model.register_forward_pre_hook(self._note_length, with_kwargs=True)
        with noting:
            return super().training_step(batch, batch_idx)

    def _note_length(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.lengths.add(kwargs["input_ids"].shape[1])

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
    size = run.size or ranks["size"]
    rows = make_rows(run, ranks["size"] // size)
    module, strategy = OfRun(run, rows), run.make(context_parallel_size=size)
    options = {"accumulate_grad_batches": run.num_micro_batches, "gradient_clip_val": MAX_NORM}
    result = fit(ranks, strategy, module, None, use_distributed_sampler=True, **options)
    result |= {"logged": module.logged, "lengths": module.lengths}
    loader = DataLoader(rows, batch_size=BATCH_SIZE)
    (result["validation"],) = result["trainer"].validate(module, loader, verbose=False)
    return result


def _predict_after_fit(ranks: dict[str, Any]) -> dict[str, Any]:
    """Rows stay whole in ``predict``, also with a module that was trained on pieces."""
    module = OfRun(RUNS["ddp"])
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
    return fit(ranks, strategy, OfRun(RUNS["ddp"]), list(loader), may_fail=True)


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
    return {"whole": whole_parameters(model, model), "logit_counts": logit_counts(model)}


def reference(run: Run, num_groups: int, device: str, max_norm: float = MAX_NORM) -> Reference:
    """One process, stock model, whole rows of all groups, plain loop over steps."""
    batches = list(DataLoader(make_rows(run, num_groups), batch_size=run.num_micro_batches * BATCH_SIZE * num_groups))
    for batch in batches if run.is_packed else ():
        batch["labels"][batch["position_ids"] == 0] = -100  # no token of another document predicts it
    return reference_training(build_model(run), [batches], device, max_norm=max_norm)


def results(ranks: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: _fit(run, ranks) for name, run in RUNS.items()},
        "fabric": _fabric(ranks["device"], ranks["size"]),
        "predict": _predict_after_fit(ranks),
        "different-rows": _different_rows(ranks),
    }


# What is checked of them

NUM_PROCESSES = {"cpu": 4, "cuda": NUM_RANKS}
"""Four, where possible, are two groups of two."""


@pytest.mark.parametrize("name", RUNS)
def test_ranks_that_share_sequences_train_as_one_process_with_whole_ones(ranks, name):
    device, results, _ = ranks
    run, num_ranks = RUNS[name], len(results)
    size = run.size or num_ranks
    wanted = reference(run, num_ranks // size, device)
    for result in (result[name] for result in results):
        assert result["lengths"] == {SEQ_LEN // size}
        assert result["num_replaced"] >= 10
        assert result["logit_counts"] == (NUM_STEPS * run.num_micro_batches, 0)
        assert result["metrics"]["train_loss"] == pytest.approx(wanted.mean, rel=TOLERANCE[device])
        # The loss of a rank is of its own tokens; what is logged is that of the step.
        assert_trained_as(wanted, [result | {"losses": result["logged"]}], device)
    if name.startswith("hybrid"):
        num_parameters = sum(tensor.numel() for tensor in wanted.parameters.values())
        assert sum(result[name]["num_own"] for result in results) == num_ranks // 2 * num_parameters


@pytest.mark.parametrize("name", RUNS)
def test_ranks_agree_on_the_validation_loss(ranks, name):
    first, *others = (result[name]["validation"] for result in ranks.results)
    assert others == [first] * len(others)
    assert first["val_loss"] < ranks.results[0][name]["logged"][0]


def test_loop_of_the_page_on_sequences_trains_as_one_process_with_whole_ones(ranks):
    device, results, _ = ranks
    run = LOOP_OF_THE_PAGE
    wanted = reference(run, len(results) // run.size, device, max_norm=float("inf"))
    for result in (result["fabric"] for result in results):
        assert result["logit_counts"] == (NUM_STEPS, 0)
        assert_same_parameters(result["whole"], wanted.parameters, 10 * TOLERANCE[device])


def test_rows_stay_whole_in_predict(ranks):
    rows = next(iter(DataLoader(make_rows(RUNS["ddp"], 1), batch_size=BATCH_SIZE)))
    for result in (result["predict"] for result in ranks.results):
        assert result["implementation"] == "sdpa"
        model = build_model(RUNS["ddp"])
        model.load_state_dict(result["state"])
        torch.testing.assert_close(result["logits"], model(rows["input_ids"]).logits, rtol=1e-4, atol=1e-4)


def test_different_rows_on_ranks_that_share_sequences_are_refused(ranks):
    for rank, result in enumerate(ranks.results):
        message = f"ranks that share a sequence got different batches (rank {rank} of them"
        assert message in result["different-rows"]["error"]


# One process


def test_mean_of_means_is_refused_because_pieces_have_different_numbers_of_labels(tmp_path):
    class OfMicroBatches(OfRun):
        loss_normalization = "micro_batch"

    trainer = make_trainer(root=tmp_path, strategy="liger_ddp")
    trainer.strategy.context_parallel = object()
    with pytest.raises(ValueError, match=r"needs loss_normalization='tokens' .* got loss_normalization='micro_batch'"):
        trainer.fit(OfMicroBatches(RUNS["ddp"]), DataLoader(make_rows(RUNS["ddp"], 1), batch_size=BATCH_SIZE))


@pytest.fixture
def context(tmp_path):
    """Of a group of one rank."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return ContextParallel(1)


def test_group_of_one_rank_computes_what_the_model_does_and_can_be_undone(context):
    run = RUNS["ddp-groups-packed"]
    model, batch = build_model(run), next(iter(DataLoader(make_rows(run, 1), batch_size=2)))
    assert attention_implementation(model) == "eager"
    wanted = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
    context.apply(nn.Sequential(model))  # as deep inside as it may be
    other = ContextParallel(1)
    other.apply(model)  # as a second Trainer does, whose groups are others
    assert all(module.self_attn.context_parallel.context is other for module in model.model.layers)
    assert model.config._attn_implementation == "liger_context_parallel"
    assert attention_implementation(model) == "eager"
    piece = context.split(batch)
    piece.pop("shift_labels")
    torch.testing.assert_close(model(**piece).logits, wanted)
    context.undo(model)
    context.undo(model)
    assert model.config._attn_implementation == "eager"
    assert model(batch["input_ids"], position_ids=batch["position_ids"]).logits.equal(wanted)


@pytest.mark.parametrize("model_type", ["mamba", "bamba", "qwen3_next", "falcon_h1"])
def test_models_that_mix_tokens_outside_of_attention_are_refused(context, model_type: str):
    with pytest.raises(ValueError, match="ForCausalLM mixes tokens by means other"):
        context.apply(tiny_causal_lm(model_type))


def test_models_without_an_attention_that_can_be_split_are_refused(context):
    with pytest.raises(ValueError, match="BloomForCausalLM does not use transformers' AttentionIn"):
        context.apply(tiny_causal_lm("bloom"))
    context.size = 3
    with pytest.raises(ValueError, match="context_parallel_size=3 must divide the 4 attention heads of LlamaForCausal"):
        context.apply(tiny_model("llama"))


def test_masks_and_missing_positions_are_refused(context):
    model, ids = tiny_model("llama"), torch.ones(1, 4, dtype=torch.int64)
    model.set_attn_implementation("liger_context_parallel")
    with pytest.raises(RuntimeError, match=r"is set by context_parallel_size of a strategy, or ContextParallel\.apply"):
        model(ids)
    model.set_attn_implementation("eager")
    context.apply(model)
    with pytest.raises(ValueError, match=r"no attention_mask .* attention_mask of shape torch.Size\(\[1, 1, 4, 4\]\)"):
        model(ids, attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))


if __name__ == "__main__":
    rank_main(results)
