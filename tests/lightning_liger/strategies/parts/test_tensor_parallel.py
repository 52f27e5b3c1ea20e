"""Tensor parallelism under ``liger_model_parallel``: pairs of processes against one with the stock model."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lightning_liger import LigerModelParallelStrategy
from lightning_liger.strategies.parts.tensor_parallel import parallelize
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    NUM_RANKS,
    VOCAB_SIZE,
    launch,
    make_trainer,
)
from tests.lightning_liger.strategies.workers.tensor_parallel import (
    CASES,
    HIDDEN,
    MAX_NORM,
    MODELS,
    NUM_STEPS,
    OPERATIONS,
    TP_SIZE,
    TinyHead,
    build_tp_model,
    make_hidden_states,
    make_tp_batches,
    make_uneven_tp_batches,
)
from tests.lightning_liger.strategies.workers.trainings import assert_trained_as, reference_training

WORKER = "tests.lightning_liger.strategies.workers.tensor_parallel"


class Ranks(NamedTuple):
    """What each rank got out of every run."""

    device: str
    folder: Any
    results: list[dict[str, Any]]

    @property
    def num_data_ranks(self) -> int:
        return len(self.results) // TP_SIZE


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request, tmp_path_factory):
    """Two data-parallel pairs, on machines with two GPUs a single one."""
    folder = tmp_path_factory.mktemp("ranks")
    num_ranks = 2 * TP_SIZE if request.param == "cpu" else NUM_RANKS
    return Ranks(request.param, folder, launch(request.param, folder, worker=WORKER, num_ranks=num_ranks))


WAYS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {},
    "qwen3": {},
    "no-kernels": {},
    "sharded-by-its-user": {},
    "by-its-user": {"max_norm": MAX_NORM},
    "clipped": {"model": "qwen3", "max_norm": MAX_NORM},
    "uneven": {"model": "qwen3", "make": make_uneven_tp_batches, "num_micro_batches": 2},
    "fabric": {"model": "tied", "of_tokens": False},
}
"""What is trained, and how one process does it; by default the model of the same name, or the first."""


@pytest.mark.parametrize("way", WAYS)
def test_tensor_parallel_ranks_train_as_one_process_with_the_stock_model(ranks, way):
    options = dict(WAYS[way])
    model, make = options.pop("model", way if way in MODELS else "untied"), options.pop("make", make_tp_batches)
    # The losses are those of each data-parallel rank's batches.
    batches = [make(rank, NUM_STEPS) for rank in range(ranks.num_data_ranks)]
    reference = reference_training(build_tp_model(model), batches, ranks.device, **options)
    assert min(reference.norms) > MAX_NORM
    assert reference.losses[0] != reference.losses[-1] or ranks.num_data_ranks == 1
    runs = [result[way] for result in ranks.results]
    assert_trained_as(reference, runs, ranks.device, ranks_per_loss=TP_SIZE)
    num_losses = 0 if way == "no-kernels" else NUM_STEPS
    for run in runs:
        # 5 norms, 2 attentions, 2 MLPs and the head; Qwen3 has norms of queries and keys besides.
        assert run["num_replaced"] == {"no-kernels": 0, "qwen3": 14, "clipped": 14, "uneven": 14}.get(way, 10)
        assert run["logit_counts"] == (num_losses, 0)
        assert run.get("counts_after_validation", (2 * num_losses, 0)) == (2 * num_losses, 0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lower_precisions_train_fused(ranks, precision):
    if precision == "bf16-true":
        torch.set_default_dtype(torch.bfloat16)  # as Lightning does while configure_model draws the weights
    batches = [make_tp_batches(rank, NUM_STEPS) for rank in range(ranks.num_data_ranks)]
    losses = reference_training(build_tp_model("untied"), batches, ranks.device).losses
    for rank, result in enumerate(ranks.results):
        assert result[precision]["logit_counts"] == (2, 0)
        assert result[precision]["losses"] == pytest.approx(losses[rank // TP_SIZE][:2], rel=2.0**-8)


def test_model_on_the_meta_device_gets_the_same_values_on_all_ranks(ranks):
    first, *others = (result["meta"] for result in ranks.results)
    for name, parameter in first["whole"].items():
        assert parameter.isfinite().all()
        assert all(torch.equal(parameter, other["whole"][name]) for other in others)
    assert first["losses"][0] == pytest.approx(math.log(VOCAB_SIZE), rel=0.05)
    assert not first["whole"]["model.embed_tokens.weight"][52].any()  # the padding token's


@pytest.mark.parametrize("way", ["untied", "tied", "qwen3"])
def test_ranks_hold_parts_of_what_the_plan_names_and_equal_copies_of_the_rest(ranks, way):
    first, second = (result[way] for result in ranks.results[:TP_SIZE])
    kinds: dict[str, set[str]] = {}
    for name, placement in first["placements"].items():
        kinds.setdefault("copies" if placement.startswith("R") else "parts", set()).add(name.split(".")[-2])
        if placement.startswith("R"):
            assert torch.equal(first["own"][name], second["own"][name]), name
        else:
            assert first["own"][name].numel() < 0.6 * first["whole"][name].numel()
    norms = {"input_layernorm", "post_attention_layernorm", "norm"} | (
        {"q_norm", "k_norm"} if way == "qwen3" else set()
    )
    projections = {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    assert kinds == {"copies": norms, "parts": projections | {"embed_tokens", "lm_head"}}


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_full_checkpoint_loads_into_the_stock_model(ranks, name):
    state = torch.load(ranks.folder / f"{name}.ckpt", weights_only=False)["state_dict"]
    state = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    model = build_tp_model(name)
    model.load_state_dict(state)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, ranks.results[0][name]["whole"][key], rtol=0.0, atol=0.0)


def test_ranks_agree_on_the_validation_loss(ranks):
    first, *others = (result["untied"]["validation"] for result in ranks.results)
    assert others == [first] * (len(ranks.results) - 1)
    assert first["val_loss"] == pytest.approx(ranks.results[0]["no-kernels"]["validation"]["val_loss"], rel=1e-5)
    accuracy = ranks.results[0]["no-kernels"]["validation"]["val_accuracy"]
    assert first["val_accuracy"] == pytest.approx(accuracy)
    assert accuracy > 0.0


# What a head's output goes through

FUSED = {"loss", "capped loss", "nll"}


@pytest.mark.parametrize(("layout", "operation"), CASES)
def test_lazy_logits_of_a_vocabulary_parallel_head_give_the_values_of_whole_ones(ranks, layout, operation):
    model = TinyHead()
    hidden_states, labels = make_hidden_states()
    value = OPERATIONS[operation](model.head(hidden_states), labels)
    value.backward()
    gradients = [hidden_states.grad, model.head.weight.grad, model.head.bias.grad]
    for result in ranks.results:
        found = result["layouts"][layout, operation]
        torch.testing.assert_close(found["value"], value.detach(), rtol=1e-5, atol=1e-6)
        for name, actual, expected in zip(("input", "weight", "bias"), found["gradients"], gradients, strict=True):
            torch.testing.assert_close(
                actual, expected, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
        if operation in FUSED:
            assert found["counts"] == (1, 0)


def test_logits_that_stay_with_their_ranks_are_real(ranks):
    whole = TinyHead().head(make_hidden_states()[0])
    for rank, result in enumerate(ranks.results):
        own = whole.chunk(TP_SIZE, -1)[rank % TP_SIZE]
        torch.testing.assert_close(result["local-shard"], own.detach(), rtol=1e-5, atol=1e-6)


# Bad input


SMALL = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(HIDDEN, VOCAB_SIZE), "needs a Hugging Face model with a tensor-parallel plan"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)), "needs a Hugging Face model"),
        (
            lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, head_dim=8)),
            "num_key_value_heads, got 1",
        ),
        (
            lambda: LlamaForCausalLM(LlamaConfig(**{**SMALL, "intermediate_size": 25})),
            "must divide out_features of 'model.layers.0.mlp.gate_proj', which is 25",
        ),
        (
            lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_key_value_heads=2)),
            "the plan of MixtralForCausalLM has",
        ),
    ],
    ids=["no model", "no plan", "heads", "width", "experts"],
)
def test_models_that_cannot_be_spread_are_refused_and_left_alone(build, message):
    class TwoRanks:
        def size(self) -> int:
            return 2

    model = build()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=rf"tensor_parallel_size=2.*{message}"):
        parallelize(model, TwoRanks())
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_tensor_parallel_size_needs_as_many_processes(tmp_path):
    strategy = LigerModelParallelStrategy(tensor_parallel_size=2)
    trainer = make_trainer(root=tmp_path, strategy=strategy, devices=1)
    with pytest.raises(ValueError, match="tensor_parallel_size must be a divisor of the number of processes, 1, got 2"):
        trainer.fit(LM(), [make_tp_batches(0, 1)[0]])
