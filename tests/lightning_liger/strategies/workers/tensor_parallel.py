"""Trainings on pairs of tensor-parallel ranks that ``test_tensor_parallel.py`` compares with one process.

With four ranks two pairs are data-parallel.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
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
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    VOCAB_SIZE,
    Batch,
    logit_counts,
    make_batches,
    make_uneven_batches,
)
from tests.lightning_liger.strategies.workers.trainings import fit, fit_with_fabric, rank_main

TP_SIZE = 2
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


def _sharded(module: LM) -> nn.Module:
    """Is both."""
    model = _parallelized(module)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=module.device_mesh["data_parallel"])
    return model


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


def _gathered(value: Any) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()


def _layouts(device: str, mesh: DeviceMesh) -> dict[str, Any]:
    """For each layout and operation its value, the gradients of hidden states and head, and the ledger's counts."""
    results: dict[str, Any] = {}
    for layout, operation in CASES:
        compute = OPERATIONS[operation]
        model = TinyHead().to(device)
        apply_liger_kernels(model, ["linear_cross_entropy"])
        parallelize_module(model.head, mesh, LAYOUTS[layout]())
        hidden_states, labels = (tensor.detach().to(device) for tensor in make_hidden_states())
        if layout.endswith("dtensor") and operation not in PLAIN_LABELS:
            labels = DTensor.from_local(labels, mesh, [Replicate()])
        is_split = layout == "from-sequence-shards"
        own = hidden_states.chunk(TP_SIZE, 1)[mesh.get_local_rank()] if is_split else hidden_states
        own = own.clone().requires_grad_()
        value = compute(model.head(own), labels)
        value.backward()
        gradient = DTensor.from_local(own.grad, mesh, [Shard(1)]) if is_split else own.grad
        results[layout, operation] = {
            "value": _gathered(value),
            "gradients": [_gathered(x) for x in (gradient, model.head.weight.grad, model.head.bias.grad)],
            "counts": logit_counts(model),
        }
    return results


def _local_shard(device: str, mesh: DeviceMesh) -> Tensor:
    """The logits of a head whose user wants those of this rank's classes."""
    model = TinyHead().to(device)
    apply_liger_kernels(model, ["linear_cross_entropy"])
    parallelize_module(model.head, mesh, ColwiseParallel())
    logits = model.head(make_hidden_states()[0].detach().to(device))
    assert isinstance(logits, Tensor)
    return logits.detach().cpu()


def results(run: dict[str, Any]) -> dict[str, Any]:
    fabric = FabricLigerModelParallelStrategy(tensor_parallel_size=TP_SIZE)
    found: dict[str, Any] = {
        "untied": _fit(run, "untied", save_as="untied.ckpt"),
        "tied": _fit(run, "tied", save_as="tied.ckpt"),
        "qwen3": _fit(run, "qwen3"),
        "no-kernels": _fit(run, "untied", strategy={"kernels": "none"}),
        "by-its-user": _fit(run, _parallelized, gradient_clip_val=MAX_NORM),
        "sharded-by-its-user": _fit(run, _sharded),
        "clipped": _fit(run, "qwen3", gradient_clip_val=MAX_NORM),
        "meta": _fit(run, _on_meta, max_steps=2),
        "bf16-mixed": _fit(run, "untied", precision="bf16-mixed", max_steps=2),
        "bf16-true": _fit(run, "untied", precision="bf16-true", max_steps=2),
        "uneven": _fit(run, "qwen3", make_uneven_tp_batches, accumulate_grad_batches=2),
        "fabric": fit_with_fabric(run, fabric, build_tp_model("tied"), make_tp_batches(run["rank"] // TP_SIZE)),
    }
    shape = (run["size"] // TP_SIZE, TP_SIZE)
    mesh = init_device_mesh(run["device"], shape, mesh_dim_names=("data", "tensor"))["tensor"]
    return found | {"layouts": _layouts(run["device"], mesh), "local-shard": _local_shard(run["device"], mesh)}


if __name__ == "__main__":
    rank_main(results)
