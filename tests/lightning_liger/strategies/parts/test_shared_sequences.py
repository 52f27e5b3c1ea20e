"""Sequences split over ranks: the same losses and parameters as one process with whole ones and the stock model."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_liger import ContextParallel, LigerDDPStrategy, LigerModelParallelStrategy, LigerStrategy
from lightning_liger.sequences.context_parallel import attention_implementation
from tests.lightning_liger.architectures import tiny_causal_lm
from tests.lightning_liger.strategies.workers.context_parallel import (
    BATCH_SIZE,
    LM,
    LOOP_OF_THE_PAGE,
    NUM_STEPS,
    RUNS,
    SEQ_LEN,
    build_model,
    group_size,
    make_rows,
    reference,
)
from tests.lightning_liger.strategies.workers.distributed import NUM_RANKS, launch, make_trainer
from tests.lightning_liger.strategies.workers.trainings import TOLERANCE, assert_same_parameters
from tests.lightning_liger.tiny import tiny_model

NUM_PROCESSES = {"cpu": 4, "cuda": NUM_RANKS}
"""Four, where possible, are two groups of two."""


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request, tmp_path_factory):
    """The device and what every rank got out of every run."""
    folder = tmp_path_factory.mktemp("ranks")
    worker = "tests.lightning_liger.strategies.workers.context_parallel"
    return request.param, launch(request.param, folder, worker=worker, num_ranks=NUM_PROCESSES[request.param])


@pytest.mark.parametrize("name", RUNS)
def test_ranks_that_share_sequences_train_as_one_process_with_whole_ones(ranks, name):
    device, results = ranks
    run, num_ranks = RUNS[name], len(results)
    size = group_size(run, num_ranks)
    wanted = reference(run, num_ranks // size, device)
    for result in (result[name] for result in results):
        assert result["lengths"] == {SEQ_LEN // size}
        assert result["num_replaced"] >= 10
        assert result["logit_counts"] == (NUM_STEPS * run.num_micro_batches, 0)
        assert result["logged"] == pytest.approx(wanted["losses"], rel=TOLERANCE[device])
        assert result["metrics"]["train_loss"] == pytest.approx(wanted["mean"], rel=TOLERANCE[device])
        assert_same_parameters(result["whole"], wanted["whole"], 10 * TOLERANCE[device])
    if name.startswith("hybrid"):
        num_parameters = sum(tensor.numel() for tensor in wanted["whole"].values())
        assert sum(result[name]["num_own"] for result in results) == num_ranks // 2 * num_parameters


@pytest.mark.parametrize("name", RUNS)
def test_ranks_agree_on_the_validation_loss(ranks, name):
    first, *others = (result[name]["validation"] for result in ranks[1])
    assert others == [first] * len(others)
    assert first["val_loss"] < ranks[1][0][name]["logged"][0]


def test_loop_of_the_page_on_sequences_trains_as_one_process_with_whole_ones(ranks):
    device, results = ranks
    run = LOOP_OF_THE_PAGE
    wanted = reference(run, len(results) // run.size, device, max_norm=float("inf"))
    for result in (result["fabric"] for result in results):
        assert result["logit_counts"] == (NUM_STEPS, 0)
        assert_same_parameters(result["whole"], wanted["whole"], 10 * TOLERANCE[device])


def test_rows_stay_whole_in_predict(ranks):
    rows = next(iter(DataLoader(make_rows(RUNS["ddp"], 1), batch_size=BATCH_SIZE)))
    for result in (result["predict"] for result in ranks[1]):
        assert result["implementation"] == "sdpa"
        model = build_model(RUNS["ddp"])
        model.load_state_dict(result["state"])
        torch.testing.assert_close(result["logits"], model(rows["input_ids"]).logits, rtol=1e-4, atol=1e-4)


def test_different_rows_on_ranks_that_share_sequences_are_refused(ranks):
    for rank, result in enumerate(ranks[1]):
        message = f"ranks that share a sequence got different batches (rank {rank} of them"
        assert message in result["different-rows"]["error"]


# One process


STRATEGIES = [LigerDDPStrategy, LigerStrategy, LigerModelParallelStrategy]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_size_that_does_not_divide_the_processes_is_refused(strategy: type, tmp_path):
    with pytest.raises(RuntimeError, match=r"torch\.distributed to be initialized"):
        ContextParallel(2)
    trainer = make_trainer(root=tmp_path, strategy=strategy(context_parallel_size=2))
    with pytest.raises(ValueError, match=r"context_parallel_size=2 must divide the number of processes, which is 1"):
        trainer.fit(LM(RUNS["ddp"]), make_rows(RUNS["ddp"], 1))


def test_mean_of_means_is_refused_because_pieces_have_different_numbers_of_labels(tmp_path):
    class OfMicroBatches(LM):
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


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("bloom", "BloomForCausalLM does not take its attention from transformers' AttentionInterface"),
        ("mamba", "MambaForCausalLM mixes tokens by other means"),
        ("bamba", "BambaForCausalLM mixes tokens by other means"),
        ("qwen3_next", r"Qwen3NextForCausalLM mixes tokens by other means .*linear_attention"),
        ("falcon_h1", "FalconH1ForCausalLM mixes tokens by other means"),
    ],
)
def test_models_that_mix_tokens_outside_of_attention_are_refused(context, model_type: str, message: str):
    with pytest.raises(ValueError, match=message):
        context.apply(tiny_causal_lm(model_type))


def test_heads_that_cannot_be_divided_and_modules_without_a_model_are_refused(context):
    context.size = 3
    with pytest.raises(ValueError, match="context_parallel_size=3 must divide the 4 attention heads of LlamaForCausal"):
        context.apply(tiny_model("llama"))
    with pytest.raises(ValueError, match="needs a Hugging Face model, Linear holds none"):
        context.apply(nn.Linear(2, 2))


def test_masks_and_missing_positions_are_refused(context):
    model, ids = tiny_model("llama"), torch.ones(1, 4, dtype=torch.int64)
    model.set_attn_implementation("liger_context_parallel")
    with pytest.raises(RuntimeError, match=r"is set by context_parallel_size of a strategy, or ContextParallel\.apply"):
        model(ids)
    model.set_attn_implementation("eager")
    context.apply(model)
    with pytest.raises(ValueError, match=r"no attention_mask .* attention_mask of shape torch.Size\(\[1, 1, 4, 4\]\)"):
        model(ids, attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
