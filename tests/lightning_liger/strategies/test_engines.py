"""Two ranks train under every engine as one process with the stock model, in every way that users choose.

Numbers of tokens differ between micro-batches and ranks, users add to the loss, and gradients are clipped.
"""

import functools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.lightning_liger.strategies.workers.distributed import (
    HEADS,
    NUM_RANKS,
    build_model,
    launch,
    make_uneven_batches,
)
from tests.lightning_liger.strategies.workers.engines import (
    CHANGES,
    ENGINES,
    FABRIC_RUNS,
    MAX_NORM,
    NUM_BATCHES,
    OFFLOAD,
    RUNS,
    OwnStep,
    is_optimized,
    reference,
)
from tests.lightning_liger.strategies.workers.lifecycle import MOVES, live
from tests.lightning_liger.strategies.workers.lifecycle import NUM_BATCHES as NUM_LIFE_BATCHES
from tests.lightning_liger.strategies.workers.trainings import (
    TOLERANCE,
    Reference,
    assert_trained_as,
    reference_training,
)

reference_of = functools.cache(reference)


class Ranks(NamedTuple):
    """The device, the folder that ranks wrote to, and what each got out of every run."""

    device: str
    folder: Any
    results: list[dict[str, Any]]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [result[name] for result in self.results]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request, tmp_path_factory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    worker = "tests.lightning_liger.strategies.workers.engines"
    return Ranks(request.param, folder, launch(request.param, folder, worker))


@pytest.mark.parametrize("name", RUNS)
def test_ranks_train_as_one_process_with_the_stock_model(ranks, name):
    expected, run = reference_of(name, ranks.device), RUNS[name]
    is_plain = run.module is OwnStep
    # What wrong gradients could not pass: the model learnt, from other batches on each rank, one without any label.
    assert is_plain or expected.losses[1][0] == 0.0
    assert min(expected.norms) > MAX_NORM
    found = ranks.of(name)
    assert_trained_as(expected, found, ranks.device)
    for result in found:
        assert len(result["norms"]) == len(expected.norms) == len(result["clipped"])
        assert result["num_replaced"] >= 10 if run.num_replaced is None else result["num_replaced"] == run.num_replaced
        assert result["logit_counts"] == ((0, 0) if run.num_replaced == 0 else (NUM_BATCHES, 0))
        assert result["num_forwards"] == (2 if name == "fsdp2-recomputed" else 1) * NUM_BATCHES
    # AdamW hardly notices the scale of gradients. Without sharding, each rank holds all of them.
    is_whole = "ddp" in name or "NO_SHARD" in name
    parts = [result["clipped"] for result in found][: 1 if is_whole else NUM_RANKS]
    clipped = [math.sqrt(sum(squares)) for squares in zip(*parts, strict=True)]
    torch.testing.assert_close(clipped, [MAX_NORM] * len(clipped), rtol=10 * TOLERANCE[ranks.device], atol=0.0)


@pytest.mark.parametrize("name", RUNS)
def test_frozen_parameters_stay_and_the_gradient_of_a_frozen_head_is_not_computed(ranks, name):
    before, run = CHANGES[RUNS[name].change](), RUNS[name]
    for result in ranks.of(name):
        for key, parameter in before.named_parameters():
            is_trained = parameter.requires_grad and is_optimized(run.change, key)
            assert "unused" in key or is_trained != result["whole"][key].equal(parameter.detach()), key
        head = before.get_output_embeddings().weight if "lora" not in run.change else None
        if run.num_replaced != 0 and run.module is not OwnStep:
            assert result["head_needs_gradient"] == {head is not None and head.requires_grad}


@pytest.mark.parametrize("name", FABRIC_RUNS)
def test_ranks_train_with_fabric_as_one_process_with_the_stock_model(ranks, name):
    assert_trained_as(reference_of(name, ranks.device), ranks.of(name), ranks.device)
    for result in ranks.of(name):
        assert result["errors"] == [None] * NUM_BATCHES
        assert (result["num_replaced"], result["logit_counts"]) == (10, (NUM_BATCHES, 0))


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("fsdp2")])
def test_ranks_agree_on_the_validation_loss(ranks, name):
    for result in ranks.of(name):
        assert result["validation"] == ranks.of(name)[0]["validation"]
        assert result["counts_after_validation"] == ((0, 0) if "no-kernels" in name else (2 * NUM_BATCHES, 0))


def test_ranks_hold_parts_of_units_or_the_whole(ranks):
    layers = ["LlamaDecoderLayer"] * 2
    num_parameters = sum(parameter.numel() for parameter in build_model().parameters())
    for name, units, is_whole in (
        ("liger_ddp-whole", [], True),
        ("liger_fsdp-whole", ["Changed", *layers], False),
        ("fsdp-HYBRID_SHARD", ["Changed", *layers], False),
        ("fsdp-NO_SHARD", ["Changed", *layers], True),
        ("fsdp-by-its-user", ["LlamaModel", "Linear"], False),
        ("liger_model_parallel-whole", ["FSDPLlamaForCausalLM", *(f"FSDP{layer}" for layer in layers)], False),
        ("fsdp2-by-its-user", ["FSDPLlamaForCausalLM", "FSDPLlamaMLP", "FSDPLlamaMLP"], False),
    ):
        own = [result["num_own"] for result in ranks.of(name)]
        assert ranks.results[0][name]["units"] == units
        assert own == [num_parameters] * NUM_RANKS if is_whole else sum(own) == num_parameters
        assert is_whole or max(own) < 1.2 * num_parameters / NUM_RANKS
    assert "FSDPLinear" in ranks.results[0]["fsdp2-each-linear"]["units"]


def test_groups_of_one_process_whose_gradients_pytorch_would_not_average_are_refused(ranks):
    for result in ranks.of("groups-of-one"):
        assert "sharding_strategy=HYBRID_SHARD shards over groups of one process" in result["error"]


def test_offloaded_parameters_and_states_lie_in_the_memory_of_the_cpu(ranks):
    for name, device in ((f"{OFFLOAD}-whole", "cpu"), ("liger_fsdp-whole", ranks.device)):
        assert [result["devices"] for result in ranks.of(name)] == [{device}] * NUM_RANKS


# Checkpoints of FSDP, and generation


@pytest.mark.parametrize("name", [*HEADS, *(name for name in RUNS if OFFLOAD in name)])
def test_full_checkpoint_is_the_gathered_model_and_loads_into_stock(ranks, name):
    saved = torch.load(ranks.folder / f"{name}.ckpt", weights_only=False, map_location="cpu")["state_dict"]
    saved = {key.removeprefix("model."): value for key, value in saved.items()}
    for result in ranks.of(name):
        for whole in (saved, result["whole_after_saving"]):
            torch.testing.assert_close(whole, result["whole"], rtol=0.0, atol=0.0)
    stock = build_model(HEADS[name]) if name in HEADS else CHANGES[RUNS[name].change]()
    stock.load_state_dict(saved)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_ranks_resume_from_a_checkpoint_saved_before_the_first_step(ranks, kind):
    assert (ranks.folder / f"unstarted-{kind}.ckpt").is_dir() == (kind == "sharded")
    for started, whole in zip(ranks.of(f"started-{kind}"), ranks.of("untied"), strict=True):
        assert started["losses"] == whole["losses"]


def test_ranks_generate_with_fabric_once_the_method_is_marked(ranks):
    for result in ranks.of("generated"):
        assert "RuntimeError" in result["error"]
        assert result["tokens"].equal(result["stock"])


# The life of a module: fit, validate, test, predict and fit again


def plain_life(num_ranks: int, num_fits: int, device: str = "cpu") -> tuple[Reference, dict[str, Any]]:
    """One process with the stock model, and what it validates and predicts after the first fit."""
    batches = [make_uneven_batches(rank, NUM_LIFE_BATCHES) for rank in range(num_ranks)]
    first = build_model()
    reference_training(first, batches, device)
    found = {"losses": [], "counts": [], "tokens": []}
    with torch.no_grad():
        for batch in (batch for own in batches for batch in own):
            output = first(**{name: tensor.to(device) for name, tensor in batch.items()})
            found["counts"].append(int((batch["labels"][:, 1:] != -100).sum()))
            found["losses"].append(output.loss.item() if found["counts"][-1] else 0.0)
            found["tokens"].append(output.logits.argmax(-1).cpu())
    return reference_training(build_model(), batches, device, num_fits=num_fits), found


def assert_lived(found: list[dict[str, Any]], life: tuple[Reference, dict[str, Any]], device: str = "cpu") -> None:
    expected, after = life
    assert_trained_as(expected, found, device)
    total = sum(loss * count for loss, count in zip(after["losses"], after["counts"], strict=True))
    for rank, result in enumerate(found):
        validation, test = (result["stages"][stage][0] for stage in ("validate", "test"))
        assert validation["val_loss"] == pytest.approx(total / sum(after["counts"]), rel=TOLERANCE[device])
        assert test["test_loss"] == validation["val_loss"]
        tokens: list[Tensor] = after["tokens"][rank * NUM_LIFE_BATCHES :]
        assert all(own.equal(other) for own, other in zip(result["stages"]["predict"], tokens, strict=False))
        # Patched once, reported once, nothing added by later set-ups.
        assert (result["num_replaced"], result["same_report"]) == (10, True)
        assert result["traces"][1:] == result["traces"][:1] * 2
        # Three fits and two evaluations without logits; predictions are made of them.
        assert result["logit_counts"] == (5 * NUM_LIFE_BATCHES, 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_live_through_all_stages_and_fit_again(ranks, engine):
    assert_lived(ranks.of(f"life-{engine}"), plain_life(NUM_RANKS, 3, ranks.device), ranks.device)


def test_one_device_lives_through_all_stages_and_fits_again(tmp_path):
    assert_lived([live("liger", make_uneven_batches(0, NUM_LIFE_BATCHES), root=tmp_path)], plain_life(1, 3))


@pytest.mark.parametrize("engines", MOVES, ids="-".join)
def test_ranks_go_on_under_another_engine(ranks, engines):
    expected, _ = plain_life(NUM_RANKS, len(engines), ranks.device)
    assert_trained_as(expected, ranks.of(f"move-{'-'.join(engines)}"), ranks.device)
