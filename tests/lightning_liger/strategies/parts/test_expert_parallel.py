"""Experts split over ranks under ``liger_model_parallel`` train as in one process that has the whole batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from lightning_liger import FabricLigerModelParallelStrategy, LigerModelParallelStrategy
from liger_ops.optim import AdamW
from tests.lightning_liger.strategies.workers.distributed import LM, NUM_RANKS, Batch
from tests.lightning_liger.strategies.workers.trainings import (
    assert_trained_as,
    fit,
    fit_with_fabric,
    freeze,
    rank_main,
    reference_training,
)
from tests.lightning_liger.tiny import tiny_model

NUM_PROCESSES = {"cpu": 4}
"""On machines with fewer GPUs groups are all ranks."""
NUM_STEPS = 4
MAX_NORM = 0.5
GATHERED, ROUTED = 5, 2
"""Experts of a token: more than ranks of a group, and not."""


def build(kind: str = "qwen3_moe", top_k: int = GATHERED) -> nn.Module:
    """A tiny model whose layers have 8 experts, with balanced or biased ones; the same one each time."""
    sizes: dict[str, Any] = {"num_experts_per_tok": top_k, "attn_implementation": "eager"}
    if kind == "gpt_oss":  # has biases, and weights that are transposed and interleaved
        return tiny_model(kind, num_local_experts=8, **sizes).train()
    model = tiny_model("qwen3_moe", num_experts=8, moe_intermediate_size=20, **sizes).train()
    if kind == "lora":
        return adapted(model)
    return freeze(model, "experts") if kind == "frozen" else model


def adapted(model: Any) -> nn.Module:
    """With adapters on the weights of experts and on attention."""
    from peft import LoraConfig, get_peft_model

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        return get_peft_model(
            model, LoraConfig(r=3, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
        )


def make_batches(rank: int, num_batches: int = NUM_STEPS) -> list[Batch]:
    """Batches of one rank, of which the second has more tokens than the first, and one without labels."""
    generator = torch.Generator().manual_seed(100 + rank)
    batches = []
    for number in range(num_batches):
        input_ids = torch.randint(3, 30, (2, 7 + 2 * rank), generator=generator)
        labels = input_ids.clone()
        labels[:, : 7 if (rank, number) == (0, 2) else 2] = -100
        batches.append({"input_ids": input_ids, "labels": labels})
    return batches


class Way:
    """How a model is trained, and what of it differs."""

    def __init__(self, size: int | None, kind: str = "qwen3_moe", top_k: int = GATHERED, **options: Any) -> None:
        self.size, self.kind, self.top_k, self.options = size, kind, top_k, options
        self.num_micro_batches = options.get("accumulate_grad_batches", 1)

    def strategy(self, num_ranks: int, **options: Any) -> LigerModelParallelStrategy:
        return LigerModelParallelStrategy(
            expert_parallel_size=self.size or num_ranks, **{**self.options.get("strategy", {}), **options}
        )

    def build(self) -> nn.Module:
        return build(self.kind, self.top_k)


STEPS = {"accumulate_grad_batches": 2, "gradient_clip_val": MAX_NORM}
WAYS = {
    "one rank": Way(1),
    "gathered in pairs": Way(2, **STEPS),
    "gathered by all": Way(None, **STEPS),
    "routed in pairs": Way(2, top_k=ROUTED, strategy={"activation_checkpointing": "full"}),
    "routed by all": Way(None, top_k=ROUTED, strategy={"activation_checkpointing": "full"}, **STEPS),
    "biases": Way(2, "gpt_oss", ROUTED),
    "frozen": Way(None, "frozen"),
    "adapters in pairs": Way(2, "lora", **STEPS),
    "adapters by all": Way(None, "lora", ROUTED),
}


def _fit(run: dict[str, Any], way: Way, build: Callable[[], nn.Module] | None = None, **options: Any) -> dict[str, Any]:
    module = LM(build=lambda module: (build or way.build)())
    ours = {name: value for name, value in way.options.items() if name != "strategy"}
    strategy = way.strategy(run["size"], **options.pop("strategy", {}))
    result = fit(run, strategy, module, make_batches(run["rank"]), **{**ours, **options})
    named = [(name, each) for name, each in module.model.named_parameters() if "experts" in name and each.dim() > 1]
    result["shares"] = {
        name: each.to_local().numel() / each.numel() for name, each in named if isinstance(each, DTensor)
    }
    (optimizer,) = result["trainer"].optimizers
    states = get_optimizer_state_dict(module, optimizer)["state"]
    result["states"] = {
        (name, kind): value.full_tensor() for name, state in states.items() for kind, value in state.items() if value.dim()
    }
    return result


def results(run: dict[str, Any]) -> dict[str, Any]:
    found = {name: _fit(run, way) for name, way in WAYS.items()}
    fabric = FabricLigerModelParallelStrategy(expert_parallel_size=2)
    return found | {"fabric": fit_with_fabric(run, fabric, build(), make_batches(run["rank"]))}


@pytest.mark.parametrize("name", [*WAYS, "fabric"])
def test_ranks_that_split_experts_train_as_one_process_with_the_stock_model(ranks, name):
    way = WAYS.get(name, Way(2))
    batches = [make_batches(rank) for rank in range(len(ranks.results))]
    options = {"max_norm": MAX_NORM} if "gradient_clip_val" in way.options else {}
    options |= {"per_token": False} if name == "fabric" else {}
    reference = reference_training(
        way.build(), batches, ranks.device, num_micro_batches=way.num_micro_batches, **options
    )
    assert min(reference.norms) > MAX_NORM
    assert_trained_as(reference, ranks.of(name), ranks.device)


if __name__ == "__main__":
    rank_main(results)
