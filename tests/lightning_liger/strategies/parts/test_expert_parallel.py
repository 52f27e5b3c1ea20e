"""Experts split over ranks under ``liger_model_parallel`` train as in one process that has the whole batch."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from liger_ops.optim import AdamW
from lightning_liger import FabricLigerModelParallelStrategy, LigerModelParallelStrategy
from tests.lightning_liger.strategies.workers.distributed import LM, Batch
from tests.lightning_liger.strategies.workers.trainings import (
    TOLERANCE,
    assert_same_parameters,
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
SAVED = ("saved", "loaded by all", "loaded by one")
GATHERED, ROUTED = 5, 2
"""Experts of a token: more than ranks of a group, and not."""


def build(kind: str = "qwen3_moe", top_k: int = GATHERED) -> nn.Module:
    """A tiny model whose layers have 8 experts; the same one each time."""
    with torch.device("cpu"):  # GPUs draw other numbers
        return _build(kind, {"num_experts_per_tok": top_k})


def _build(kind: str, sizes: dict[str, Any]) -> nn.Module:
    if kind == "gpt_oss":  # has biases, and weights that are transposed and interleaved
        return tiny_model(kind, num_local_experts=8, **sizes).train()
    width = 256 if kind == "wide" else 20
    sizes |= {"output_router_logits": kind == "router loss", "moe_intermediate_size": width}
    model = tiny_model("qwen3_moe", num_experts=8, router_aux_loss_coef=0.1, **sizes).train()
    if kind == "lora":
        return adapted(model)
    return freeze(model, "experts") if kind == "frozen" else model


def adapted(model: Any, *names: str) -> nn.Module:
    """With adapters on parameters of experts, by default the weights, and on attention."""
    from peft import LoraConfig, get_peft_model

    names = names or ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        return get_peft_model(
            model, LoraConfig(r=3, target_modules=["q_proj"], target_parameters=list(names), init_lora_weights=False)
        )


def make_batches(rank: int, num_batches: int = NUM_STEPS) -> list[Batch]:
    """Batches of one rank, of which the second has more tokens than the first, and one without labels."""
    generator = torch.Generator().manual_seed(200 + rank)
    batches = []
    for number in range(num_batches):
        input_ids = torch.randint(3, 30, (2, 8 + 2 * rank), generator=generator)
        labels = input_ids.clone()
        labels[:, : 8 if (rank, number) == (0, 2) else 2] = -100
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
    "router loss": Way(2, "router loss"),
    "frozen": Way(None, "frozen"),
    "adapters in pairs": Way(2, "lora", **STEPS),
    "adapters by all": Way(None, "lora", ROUTED),
}
SHORT = ("router loss", "fabric", "resumed")
"""Of the batches that all have labels."""
WHOLE = ("liger_ddp", "liger_fsdp")
"""Strategies under which each rank has all experts, or gathers them."""


def _fit(run: dict[str, Any], way: Way, build: Callable[[], nn.Module] | None = None, **options: Any) -> dict[str, Any]:
    module = EightBit(build=lambda module: (build or way.build)())
    ours = {name: value for name, value in way.options.items() if name != "strategy"}
    strategy = way.strategy(run["size"], **options.pop("strategy", {}))
    batches = make_batches(options.pop("data_rank", run["rank"]))[: options.pop("num_batches", NUM_STEPS)]
    result = fit(run, strategy, module, batches, **{**ours, **options})
    experts = {name: each for name, each in module.model.named_parameters() if "experts" in name and each.dim() > 1}
    result["shares"] = {name: each.to_local().numel() / each.numel() for name, each in experts.items()}
    (optimizer,) = result["trainer"].optimizers
    result["states"] = {
        (name, kind): value.full_tensor()
        for name, state in get_optimizer_state_dict(module, optimizer)["state"].items()
        for kind, value in state.items()
        if value.dim()
    }
    return result


class EightBit(LM):
    """Has moments in 8 bits for weights whose rows are long enough, which those of wide experts are."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = [each for each in self.parameters() if each.requires_grad]
        return AdamW(parameters, lr=3e-3, weight_decay=0.1, state_dtype="8bit" if self.is_wide else None)

    @property
    def is_wide(self) -> bool:
        return getattr(self.model.config, "moe_intermediate_size", 0) >= 256


def _on_meta() -> nn.Module:
    torch.manual_seed(3)  # from which values are drawn later
    with torch.device("meta"):
        return type(build())(build().config)


def results(run: dict[str, Any]) -> dict[str, Any]:
    found = {name: _fit(run, way, num_batches=2 if name in SHORT else NUM_STEPS) for name, way in WAYS.items()}
    for name in WHOLE:
        found[name] = fit(run, name, LM(build=lambda module: build()), make_batches(run["rank"]))
    shared = Way(None, strategy={"context_parallel_size": 2})
    found["sequences"] = _fit(run, shared, data_rank=run["rank"] // 2, num_batches=2)
    fabric = FabricLigerModelParallelStrategy(expert_parallel_size=2)
    found["fabric"] = fit_with_fabric(run, fabric, build(), make_batches(run["rank"])[:2])
    for kind in ("qwen3_moe", "wide"):
        saving, by_all, alone = Way(2, kind), Way(None, kind), Way(1, kind)
        path = run["folder"] / f"{kind}.ckpt"
        found[f"{kind} saved"] = _fit(run, saving, num_batches=2, save_as=path.name)
        found[f"{kind} loaded by all"] = _fit(run, by_all, num_batches=2, ckpt_path=path)
        found[f"{kind} loaded by one"] = _fit(run, alone, num_batches=2, ckpt_path=path)
    path = run["folder"] / "qwen3_moe.ckpt"
    found["resumed"] = _fit(run, Way(None), num_batches=2, ckpt_path=path, max_epochs=2)
    whole = {"strategy": {"save_distributed_checkpoint": False}}
    found["whole"] = _fit(run, Way(2, "gpt_oss"), max_steps=1, save_as="whole.ckpt", **whole)
    for name, size in (("meta of one", 1), ("meta of pairs", 2), ("meta of all", None)):
        found[name] = _fit(run, Way(size), _on_meta, max_steps=0)
    found["bf16-true"] = _fit(run, Way(2), max_steps=2, precision="bf16-true")
    found["bf16-true of one"] = _fit(run, Way(1), max_steps=2, precision="bf16-true")
    for name, (build_wrong, _) in WRONG.items():
        module, strategy = LM(build=build_wrong), LigerModelParallelStrategy(expert_parallel_size=2)
        found[name] = fit(run, strategy, module, make_batches(run["rank"]), may_fail=True)
    return found


def _sharded(module: LM) -> nn.Module:
    model = build()
    fully_shard(model, mesh=module.device_mesh["data_parallel"])
    return model


WRONG: dict[str, tuple[Callable[[LM], nn.Module], str]] = {
    "no experts": (lambda module: tiny_model("llama"), "needs experts that the kernel 'moe_experts' replaces"),
    "odd number": (
        lambda module: tiny_model("qwen3_moe", num_experts=7, moe_intermediate_size=20),
        r"expert_parallel_size must be a divisor of the experts of model.model.layers.0.mlp.experts\S+ of \(7,",
    ),
    "adapter of biases": (
        lambda module: adapted(build("gpt_oss"), "mlp.experts.gate_up_proj_bias"),
        "cannot split .*experts.*, which has an adapter that is not replaced",
    ),
    "sharded": (_sharded, "needs a model that is not sharded yet"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_split_is_refused(ranks, name):
    for run in ranks.of(name):
        assert re.search(WRONG[name][1], run["error"])


def test_size_is_set_by_yaml(made_by_yaml):
    strategy = {"class_path": "lightning_liger.LigerModelParallelStrategy", "init_args": {"expert_parallel_size": 2}}
    with pytest.raises(ValueError, match="expert_parallel_size must be a divisor of the number of processes, 1, got 2"):
        made_by_yaml(strategy).setup_environment()


def test_lower_precision_trains_as_whole_experts(ranks):
    for run, whole in zip(ranks.of("bf16-true"), ranks.of("bf16-true of one"), strict=True):
        assert run["losses"] == pytest.approx(whole["losses"], rel=2.0**-7)
        assert run["gradient_dtypes"] == {torch.bfloat16}


@pytest.mark.parametrize("name", [*WAYS, *WHOLE, "fabric", "resumed"])
def test_ranks_that_split_experts_train_as_one_process_with_the_stock_model(ranks, name):
    way = WAYS.get(name, Way(2))
    num_batches = 2 if name in SHORT else NUM_STEPS
    batches = [make_batches(rank)[:num_batches] for rank in range(len(ranks.results))]
    if name == "resumed":  # after the first epoch
        batches = [each * 2 for each in batches]
    options = {"max_norm": MAX_NORM} if "gradient_clip_val" in way.options else {}
    options |= {"per_token": False} if name == "fabric" else {}
    reference = reference_training(
        way.build(), batches, ranks.device, num_micro_batches=way.num_micro_batches, **options
    )
    assert min(reference.norms) > MAX_NORM
    if name == "resumed":
        reference = reference._replace(losses=[each[2:] for each in reference.losses], norms=reference.norms[2:])
    assert_trained_as(reference, ranks.of(name), ranks.device)


def test_ranks_split_experts_and_sequences(ranks):
    batches = [make_batches(rank)[:2] for rank in range(len(ranks.results) // 2)]
    reference = reference_training(build(), batches, ranks.device)
    for run in ranks.of("sequences"):
        assert_same_parameters(run["whole"], reference.parameters, 10 * TOLERANCE[ranks.device])


def test_each_rank_has_an_equal_part_of_every_weight_of_experts(ranks):
    num_ranks = len(ranks.results)
    for name in ("gathered in pairs", "gathered by all", "biases", "frozen"):
        for run in ranks.of(name):
            parts = {each: share for each, share in run["shares"].items() if "norm" not in each}
            assert parts
            assert set(parts.values()) == {1 / num_ranks}, name


@pytest.mark.parametrize("kind", ["qwen3_moe", "wide"])
def test_checkpoint_of_pairs_is_loaded_by_other_groups_bit_for_bit(ranks, kind):
    for saved, by_all, by_one in zip(*(ranks.of(f"{kind} {way}") for way in SAVED), strict=True):
        assert any(name.endswith("_codes") for _, name in saved["states"]) == (kind == "wide")
        for loaded in (by_all, by_one):
            for part in ("whole", "states"):
                assert saved[part].keys() == loaded[part].keys()
                assert all(torch.equal(value, loaded[part][name]) for name, value in saved[part].items())


def test_full_checkpoint_loads_into_the_stock_model(ranks):
    state = torch.load(ranks.folder / "whole.ckpt", weights_only=False)["state_dict"]
    model = Way(2, "gpt_oss").build()
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    for name, value in model.state_dict().items():
        assert torch.equal(value, ranks.results[0]["whole"]["whole"][name]), name


def test_model_on_the_meta_device_gets_the_same_values_in_groups_of_any_size(ranks):
    first = ranks.results[0]["meta of one"]["whole"]
    for name in ("meta of pairs", "meta of all"):
        for run in ranks.of(name):
            assert all(torch.equal(value, run["whole"][key]) for key, value in first.items())


if __name__ == "__main__":
    rank_main(results)
