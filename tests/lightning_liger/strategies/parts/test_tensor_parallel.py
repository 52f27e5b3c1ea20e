"""Tensor parallelism under ``liger_model_parallel``: pairs of processes against one with the stock model."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from lightning_liger import (
    FabricLigerModelParallelStrategy,
    LigerModelParallelStrategy,
    apply_liger_kernels,
    divergence,
    token_loss,
    token_scores,
    topk_log_probs,
)
from lightning_liger.strategies.parts.tensor_parallel import parallelize
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    VOCAB_SIZE,
    Batch,
    logit_counts,
    make_batches,
    make_uneven_batches,
)
from tests.lightning_liger.strategies.workers.trainings import (
    assert_trained_as,
    error_of,
    fit,
    fit_with_fabric,
    rank_main,
    reference_training,
)
from tests.lightning_liger.tiny import tiny_model

TP_SIZE = 2
NUM_PROCESSES = {"cpu": 2 * TP_SIZE}
"""Two data-parallel pairs, on machines with two GPUs a single one."""
NUM_STEPS = 6
MAX_NORM = 0.5
_SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 36, "head_dim": 8, "intermediate_size": 46, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True)),
    # Norms of the queries and keys see the heads of one rank only; the padding token's embedding is not trained.
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, tie_word_embeddings=False, pad_token_id=52)),
}
"""Models whose vocabulary is odd, so that ranks have shards of two sizes."""


def build_tp_model(name: str) -> PreTrainedModel:
    """A tiny model; the same one each time."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(7)
        return MODELS[name]().train()


def make_tp_batches(
    rank: int, num_batches: int = NUM_STEPS, make: Callable[[int, int], list[Batch]] = make_batches
) -> list[Batch]:
    """The usual batches, of tokens that are on both sides of where the vocabulary is cut."""
    batches = make(rank, num_batches)
    for batch in batches:
        batch["input_ids"] += 40
        batch["labels"] += 40 * (batch["labels"] >= 0)
    return batches


make_uneven_tp_batches = partial(make_tp_batches, make=make_uneven_batches)


def user_plan(model: PreTrainedModel) -> dict[str, Any]:
    """A plan of PyTorch's own styles."""
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index in range(model.config.num_hidden_layers):
        layer = f"model.layers.{index}"
        plan |= {f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{layer}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{layer}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    return plan


def _on_meta(module: LM) -> nn.Module:
    """Has neither memory nor values when the strategy sees it."""
    with torch.device("meta"):
        return MODELS["qwen3"]()


def _parallelized(module: LM) -> nn.Module:
    """Is tensor-parallel when the strategy sees it, but not data-parallel."""
    model = build_tp_model("untied")
    return parallelize_module(model, module.device_mesh["tensor_parallel"], user_plan(model))


def _fit(
    run: dict[str, Any], model: str | Callable[[LM], nn.Module], make: Any = make_tp_batches, **options: Any
) -> dict[str, Any]:
    module = LM(build=model if callable(model) else lambda module: build_tp_model(model))
    strategy = LigerModelParallelStrategy(
        tensor_parallel_size=TP_SIZE, save_distributed_checkpoint=False, **options.pop("strategy", {})
    )
    batches = make(run["rank"] // TP_SIZE, NUM_STEPS)
    result = fit(run, strategy, module, batches, **options)
    named = dict(module.model.named_parameters(remove_duplicate=False))
    result["own"] = {name: parameter.to_local().detach().cpu().clone() for name, parameter in named.items()}
    result["placements"] = {name: str(parameter.placements[-1]) for name, parameter in named.items()}
    loader = DataLoader(batches, batch_size=None)
    (result["validation"],) = result["trainer"].validate(module, loader, verbose=False)
    result["counts_after_validation"] = logit_counts(module)
    return result


# What a head's output goes through, without a Trainer

HIDDEN = 6


class ReplicatedHead(ParallelStyle):
    """Each rank has the whole head, as a DTensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            input_fn=lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),
            output_fn=lambda _, output, mesh: output.to_local(),
        )


LAYOUTS: dict[str, Callable[[], ParallelStyle]] = {
    "gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
    "from-sequence-shards": lambda: ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    "gathered-dtensor": lambda: ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
    "sharded-dtensor": lambda: ColwiseParallel(use_local_output=False),
    "replicated": ReplicatedHead,
}
OPERATIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "loss": lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    "capped loss": lambda logits, labels: F.cross_entropy((logits / 3.0).tanh().flatten(0, 1) * 3.0, labels.flatten()),
    "nll": lambda logits, labels: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten()),
    "square": lambda logits, labels: logits.square().sum(),
    "part of the vocabulary": lambda logits, labels: logits[..., :50].square().sum(),
    "at labels": lambda logits, labels: logits.gather(-1, labels.clamp(min=0)[..., None]).sum(),
    "log-probabilities": lambda logits, labels: logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).sum(),
    "logsumexp": lambda logits, labels: logits.logsumexp(-1).sum(),
    "maximum": lambda logits, labels: logits.amax(-1).sum(),
    "predictions": lambda logits, labels: logits.argmax(-1).float().sum() + 0.0 * logits.float().mean(),
    "scores": lambda logits, labels: sum(
        token_scores(logits, labels, outputs=("log_probs", "entropy", "lse"))[:3]
    ).sum(),
    "token loss": lambda logits, labels: token_loss(
        logits, labels, lambda scores, index: -scores.log_probs.exp().detach() * scores.log_probs
    )[0],
    "classes": lambda logits, labels: topk_log_probs(
        logits, torch.arange(24, device=labels.device).view(2, 4, 3) * 2
    ).sum(),
    "divergence": lambda logits, labels: divergence(logits, (logits * 0.3).detach(), kind="jsd", reduction="sum"),
    "entropy": lambda logits, labels: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(),
}
FUSED = {"loss", "capped loss", "nll"}
PLAIN_LABELS = {"capped loss", "nll", "scores", "token loss"}
"""Losses whose labels are plain tensors also where logits are a DTensor; other operations' are DTensors as well."""

CASES = [
    (layout, operation)
    for layout in LAYOUTS
    for operation in OPERATIONS
    # A DTensor that is sharded over the vocabulary fails in gather itself, PyTorch's own as well.
    if layout != "sharded-dtensor" or operation not in ("at labels", "log-probabilities")
]


class TinyHead(nn.Module):
    """Embeddings and a head with a bias."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embeddings = nn.Embedding(VOCAB_SIZE, HIDDEN)
            self.head = nn.Linear(HIDDEN, VOCAB_SIZE)


def make_hidden_states() -> tuple[Tensor, Tensor]:
    """``[2, 4, HIDDEN]``, a leaf, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(VOCAB_SIZE, (2, 4), generator=generator)
    labels[0, 1] = -100
    return torch.randn(2, 4, HIDDEN, generator=generator).requires_grad_(), labels


def _check_head(case: tuple[str, str], device: str, mesh: DeviceMesh) -> None:
    """That an operation on lazy logits in a layout has the value and gradients that it has on whole logits."""
    layout, operation = case
    expected, model = TinyHead(), TinyHead().to(device)
    whole, labels = make_hidden_states()
    expected_value = OPERATIONS[operation](expected.head(whole), labels)
    expected_value.backward()
    apply_liger_kernels(model, ["linear_cross_entropy"])
    parallelize_module(model.head, mesh, LAYOUTS[layout]())
    labels = labels.to(device)
    if layout.endswith("dtensor") and operation not in PLAIN_LABELS:
        labels = DTensor.from_local(labels, mesh, [Replicate()])
    own = whole.detach().to(device)
    if layout == "from-sequence-shards":
        own = own.chunk(TP_SIZE, 1)[mesh.get_local_rank()]
    own = own.clone().requires_grad_()
    value = OPERATIONS[operation](model.head(own), labels)
    value.backward()
    gradient = DTensor.from_local(own.grad, mesh, [Shard(1)]) if layout == "from-sequence-shards" else own.grad
    found = [value.detach(), gradient, model.head.weight.grad, model.head.bias.grad]
    wanted = [expected_value.detach(), whole.grad, expected.head.weight.grad, expected.head.bias.grad]
    found = [(each.full_tensor() if isinstance(each, DTensor) else each).cpu() for each in found]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert operation not in FUSED or logit_counts(model) == (1, 0)


def _check_local_shard(device: str, mesh: DeviceMesh) -> None:
    """That the logits of a head whose user wants those of this rank's classes are real."""
    model, hidden_states = TinyHead().to(device), make_hidden_states()[0].detach()
    whole = TinyHead().head(hidden_states).detach()
    apply_liger_kernels(model, ["linear_cross_entropy"])
    parallelize_module(model.head, mesh, ColwiseParallel())
    found = model.head(hidden_states.to(device)).detach().cpu()
    torch.testing.assert_close(found, whole.chunk(TP_SIZE, -1)[mesh.get_local_rank()], rtol=1e-5, atol=1e-6)


def results(run: dict[str, Any]) -> dict[str, Any]:
    fabric = FabricLigerModelParallelStrategy(tensor_parallel_size=TP_SIZE)
    found: dict[str, Any] = {
        "untied": _fit(run, "untied", save_as="untied.ckpt"),
        "tied": _fit(run, "tied", save_as="tied.ckpt"),
        "qwen3": _fit(run, "qwen3", make_uneven_tp_batches, accumulate_grad_batches=2, gradient_clip_val=MAX_NORM),
        "no-kernels": _fit(run, "untied", strategy={"kernels": "none"}),
        "by-its-user": _fit(run, _parallelized, gradient_clip_val=MAX_NORM),
        "meta": _fit(run, _on_meta, max_steps=2),
        "bf16-mixed": _fit(run, "untied", precision="bf16-mixed", max_steps=2),
        "bf16-true": _fit(run, "untied", precision="bf16-true", max_steps=2),
        "fabric": fit_with_fabric(run, fabric, build_tp_model("tied"), make_tp_batches(run["rank"] // TP_SIZE)),
    }
    shape = (run["size"] // TP_SIZE, TP_SIZE)
    mesh = init_device_mesh(run["device"], shape, mesh_dim_names=("data", "tensor"))["tensor"]
    heads = {case: error_of(partial(_check_head, case, run["device"], mesh)) for case in CASES}
    return found | {"heads": heads, "local-shard": error_of(partial(_check_local_shard, run["device"], mesh))}


# What is checked of them


WAYS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {},
    "qwen3": {"make": make_uneven_tp_batches, "num_micro_batches": 2, "max_norm": MAX_NORM},
    "no-kernels": {},
    "by-its-user": {"max_norm": MAX_NORM},
    "fabric": {"model": "tied", "per_token": False},
}
"""What is trained, and how one process does it; by default the model of the same name, or the first."""


@pytest.mark.parametrize("way", WAYS)
def test_tensor_parallel_ranks_train_as_one_process_with_the_stock_model(ranks, way):
    options = dict(WAYS[way])
    model, make = options.pop("model", way if way in MODELS else "untied"), options.pop("make", make_tp_batches)
    # The losses are those of each data-parallel rank's batches.
    batches = [make(rank, NUM_STEPS) for rank in range(len(ranks.results) // TP_SIZE)]
    reference = reference_training(build_tp_model(model), batches, ranks.device, **options)
    assert min(reference.norms) > MAX_NORM
    assert reference.losses[0] != reference.losses[-1] or len(ranks.results) // TP_SIZE == 1
    runs = [result[way] for result in ranks.results]
    assert_trained_as(reference, runs, ranks.device, ranks_per_loss=TP_SIZE)
    num_losses = 0 if way == "no-kernels" else NUM_STEPS
    for run in runs:
        # 5 norms, 2 attentions, 2 MLPs and the head; Qwen3 has norms of queries and keys besides.
        assert run["num_replaced"] == {"no-kernels": 0, "qwen3": 14}.get(way, 10)
        assert run["logit_counts"] == (num_losses, 0)
        assert run.get("counts_after_validation", (2 * num_losses, 0)) == (2 * num_losses, 0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lower_precisions_train_fused(ranks, precision):
    if precision == "bf16-true":
        torch.set_default_dtype(torch.bfloat16)  # as Lightning does while configure_model draws the weights
    batches = [make_tp_batches(rank, NUM_STEPS) for rank in range(len(ranks.results) // TP_SIZE)]
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
    accuracy = ranks.results[0]["no-kernels"]["validation"]["val_mean_token_accuracy"]
    assert first["val_mean_token_accuracy"] == pytest.approx(accuracy)
    assert accuracy > 0.0


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_lazy_logits_of_a_vocabulary_parallel_head_give_the_values_of_whole_ones(ranks, case):
    assert [result["heads"][case] for result in ranks.results] == [None] * len(ranks.results)


def test_logits_that_stay_with_their_ranks_are_real(ranks):
    assert [result["local-shard"] for result in ranks.results] == [None] * len(ranks.results)


# Bad input


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(HIDDEN, VOCAB_SIZE), "needs a Hugging Face model with a tensor-parallel plan"),
        (tiny_model("gpt2"), "needs a Hugging Face model"),
        (tiny_model("llama", num_key_value_heads=1), "num_key_value_heads, got 1"),
        (tiny_model("llama", intermediate_size=25), "out_features of 'model.layers.0.mlp.gate_proj', which is 25"),
        (tiny_model("mixtral"), "the plan of MixtralForCausalLM has"),
    ],
    ids=["no model", "no plan", "heads", "width", "experts"],
)
def test_models_that_cannot_be_spread_are_refused_and_left_alone(model, message):
    class TwoRanks:
        def size(self) -> int:
            return 2

    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=rf"tensor_parallel_size=2.*{message}"):
        parallelize(model, TwoRanks())
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


if __name__ == "__main__":
    rank_main(results)
