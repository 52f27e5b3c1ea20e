"""Two ranks train under every engine as one process with the stock model, in every way that users choose.

Numbers of tokens differ between micro-batches and ranks, users add to the loss, and gradients are clipped.
"""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.utils.data import DataLoader

from lightning_liger import (
    FabricLigerDDPStrategy,
    FabricLigerFSDPStrategy,
    LazyLogits,
    LigerDDPStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
)
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    NUM_RANKS,
    AddsToLoss,
    Batch,
    Losses,
    build_model,
    make_batches,
    make_optimizer,
    make_trainer,
    make_uneven_batches,
    regularized,
)
from tests.lightning_liger.strategies.workers.trainings import (
    TOLERANCE,
    Reference,
    assert_trained_as,
    described,
    error_of,
    fit,
    fit_with_fabric,
    freeze,
    loss_of_labels,
    loss_of_logits,
    rank_main,
    reference_training,
    with_adapters,
)

ENGINES = ("liger_ddp", "liger_fsdp", "liger_model_parallel")
NUM_BATCHES = 8
NUM_MICRO_BATCHES = 2
MAX_NORM = 0.2
"""Below the norm in every step of the tests."""
OFFLOAD = "liger_fsdp_cpu_offload"
SAVED = ("liger_fsdp-whole", "liger_fsdp-tied", f"{OFFLOAD}-whole", f"{OFFLOAD}-lora-head")
"""Runs with a full checkpoint."""
UNUSED = "liger_ddp_find_unused_parameters_true"


def _with_unused(model: nn.Module) -> nn.Module:
    model.unused_layer = nn.Linear(3, 5)
    return model


CHANGES: dict[str, Callable[[], nn.Module]] = {
    "whole": build_model,
    "tied": lambda: build_model(tied=True),
    "head-only": lambda: freeze(build_model(), "model."),
    "without-head": lambda: freeze(build_model(), "lm_head"),
    # Frozen and trained parameters side by side, in each layer and around them.
    "mixed": lambda: freeze(build_model(), "embed_tokens", "mlp"),
    "lora-attention": lambda: with_adapters("q_proj", "v_proj", model=build_model()),
    "lora-head": lambda: with_adapters("q_proj", "lm_head", model=build_model()),
    "partly-optimized": build_model,
    "layers-only": lambda: freeze(build_model(), "embed_tokens", "lm_head", "model.norm"),
    "unused": lambda: _with_unused(build_model()),
}


def is_optimized(change: str, name: str) -> bool:
    return change != "partly-optimized" or ".layers." in name


class Changed(AddsToLoss):
    """A model of ``CHANGES``; notes whether a loss needed the gradient of the head's weight, and clipped norms.

    Its user adds to the loss of each micro-batch, and has a hook without ``super()``.
    """

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.head_needs_gradient: set[bool] = set()
        self.clipped: list[float] = []

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            self.model = CHANGES[self.change]()
            self.wrap(self.model)

    def wrap(self, model: nn.Module) -> None:
        """What users do who shard a model themselves."""

    def optimized(self) -> list[nn.Parameter]:
        return [p for name, p in self.model.named_parameters() if p.requires_grad and is_optimized(self.change, name)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.optimized())

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        gradients = [parameter.grad for parameter in self.optimized() if parameter.grad is not None]
        local = [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
        self.clipped.append(sum(each.square().sum().item() for each in local))

    def lm_loss_with_counts(self, logits: LazyLogits | Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(logits, LazyLogits):
            self.head_needs_gradient.add(logits.head.weight.requires_grad)
        return super().lm_loss_with_counts(logits, *args, **kwargs)


class Sharded2ByItsUser(Changed):
    """Shards another way than ``liger_model_parallel`` would."""

    def wrap(self, model: nn.Module) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in model.model.layers:
            fully_shard(layer.mlp, mesh=mesh)
        fully_shard(model, mesh=mesh)


class ShardedByItsUser(Changed):
    """Several FSDP roots, as users can have who do not want a single one."""

    def wrap(self, model: nn.Module) -> None:
        device = self.trainer.strategy.root_device
        model.to(device)
        for name in ("model", "lm_head"):
            wrapped = FullyShardedDataParallel(getattr(model, name), use_orig_params=True, device_id=device)
            setattr(model, name, wrapped)


class OwnStep(Changed):
    """The step that users write without the mixin: the mean is over each rank's own tokens."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(**batch).loss


class Run(NamedTuple):
    """A training: the strategy or what makes it, what is trained, replaced modules, the class of the module.

    With Fabric it has a loss instead of a module, and each rank takes the mean over its own tokens.
    """

    strategy: Any
    change: str = "whole"
    num_replaced: int | None = 10
    module: type[Changed] = Changed
    loss_of: Any = None

    @property
    def is_plain(self) -> bool:
        return self.module is OwnStep or self.loss_of is not None


FSDP, FSDP2 = LigerFSDPStrategy, LigerModelParallelStrategy
_MESH = (1, NUM_RANKS)
# 5 norms, 2 MLPs, 2 attentions and the head are replaced.
RUNS: dict[str, Run] = {
    **{
        f"{engine}-{change}": Run(engine, change, None if "lora" in change else 10)
        for engine in ENGINES
        for change in CHANGES
        if change not in ("unused", "layers-only")
    },
    f"{OFFLOAD}-whole": Run(OFFLOAD),
    f"{OFFLOAD}-lora-head": Run(OFFLOAD, "lora-head", None),
    "ddp-find-unused": Run(UNUSED, "unused"),
    "ddp-static-graph": Run(partial(LigerDDPStrategy, static_graph=True), module=OwnStep),
    "ddp-own-step": Run("liger_ddp", "tied", module=OwnStep),
    "ddp-own-step-find-unused": Run(UNUSED, module=OwnStep),
    "fsdp-unused": Run("liger_fsdp", "unused"),
    "fsdp-no-kernels": Run(partial(FSDP, kernels="none"), num_replaced=0),
    "fsdp-NO_SHARD": Run(partial(FSDP, sharding_strategy="NO_SHARD")),
    "fsdp-NO_SHARD-layers-only": Run(partial(FSDP, sharding_strategy=ShardingStrategy.NO_SHARD), "layers-only"),
    "fsdp-SHARD_GRAD_OP": Run(partial(FSDP, sharding_strategy="shard_grad_op")),
    "fsdp-HYBRID_SHARD": Run(
        partial(
            FSDP,
            sharding_strategy="HYBRID_SHARD",
            device_mesh=_MESH,
            forward_prefetch=True,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        )
    ),
    "fsdp-_HYBRID_SHARD_ZERO2": Run(partial(FSDP, sharding_strategy="_HYBRID_SHARD_ZERO2", device_mesh=_MESH)),
    # A fused loss needs the head's weight after the head has run, when a separate root has freed it.
    "fsdp-by-its-user": Run(partial(FSDP, kernels="none"), num_replaced=0, module=ShardedByItsUser),
    "fsdp2-no-kernels": Run(partial(FSDP2, kernels="none"), num_replaced=0),
    "fsdp2-recomputed": Run(partial(FSDP2, activation_checkpointing_policy=["LlamaDecoderLayer"])),
    # The head among them, whose weight the loss needs after the head has run.
    "fsdp2-each-linear": Run(partial(FSDP2, auto_wrap_policy=["Linear"])),
    "fsdp2-by-its-user": Run("liger_model_parallel", num_replaced=8, module=Sharded2ByItsUser),
}


FABRIC_RUNS: dict[str, Run] = {
    **{
        f"fabric-{engine}-{change}": Run(engine, change, loss_of=loss_of)
        for engine in ENGINES
        for change, loss_of in (("whole", loss_of_labels), ("tied", loss_of_logits))
    },
    f"fabric-{OFFLOAD}": Run(OFFLOAD, loss_of=loss_of_labels),
    "fabric-ddp-find-unused": Run(UNUSED, "unused", loss_of=loss_of_logits),
    "fabric-ddp-frozen": Run(UNUSED, "head-only", loss_of=loss_of_labels),
    "fabric-ddp-static-graph": Run(partial(FabricLigerDDPStrategy, static_graph=True), loss_of=loss_of_logits),
    "fabric-fsdp-HYBRID_SHARD": Run(
        partial(FabricLigerFSDPStrategy, sharding_strategy="HYBRID_SHARD", device_mesh=_MESH), loss_of=loss_of_labels
    ),
}


@functools.cache
def reference_of(name: str, device: str) -> Reference:
    """What the run of that name is compared with."""
    run = (RUNS | FABRIC_RUNS)[name]
    make = make_batches if run.is_plain else make_uneven_batches
    return reference_training(
        CHANGES[run.change](),
        [make(rank, NUM_BATCHES) for rank in range(NUM_RANKS)],
        device,
        per_token=not run.is_plain,
        num_micro_batches=1 if run.is_plain else NUM_MICRO_BATCHES,
        max_norm=MAX_NORM,
        change=(lambda loss: loss) if run.is_plain else regularized,
        optimized=partial(is_optimized, run.change),
    )


def _fit(rank: dict[str, Any], name: str, run: Run) -> dict[str, Any]:
    if run.loss_of is not None:
        clip = partial(L.Fabric.clip_gradients, max_norm=MAX_NORM)
        batches = make_batches(rank["rank"], NUM_BATCHES)
        return fit_with_fabric(rank, run.strategy, CHANGES[run.change](), batches, run.loss_of, clip)
    module = run.module(run.change)
    batches = (make_batches if run.is_plain else make_uneven_batches)(rank["rank"], NUM_BATCHES)
    options = {"accumulate_grad_batches": 1 if run.is_plain else NUM_MICRO_BATCHES, "gradient_clip_val": MAX_NORM}
    save_as = f"{name}.ckpt" if name in SAVED else None
    result = fit(rank, run.strategy, module, batches, save_as=save_as, **options)
    return result | {"clipped": module.clipped, "head_needs_gradient": module.head_needs_gradient}


def _generate(run: dict[str, Any]) -> dict[str, Any]:
    """Continuations of another length on each rank, and the error without a marked method."""
    made = fit_with_fabric(run, "liger_fsdp", build_model(), [])
    fabric, model = made["fabric"], made["model"].eval()
    prompt = make_batches(run["rank"])[0]["input_ids"][:1]
    error = error_of(lambda: model.generate(prompt.to(fabric.device), max_new_tokens=1))
    model.mark_forward_method("generate")
    options = {"max_new_tokens": 2 + run["rank"], "do_sample": False}
    tokens = model.generate(prompt.to(fabric.device), synced_gpus=True, **options)
    return {"error": error, "tokens": tokens.cpu(), "stock": build_model().eval().generate(prompt, **options)}


NUM_LIFE_BATCHES = 3
MOVES = [("liger_ddp", "liger_fsdp"), ("liger_ddp", "liger_model_parallel")]
"""Engines under which a module is trained one after the other; the last two leave it sharded."""


def live(strategy: str, batches: list[Batch], **options: Any) -> dict[str, Any]:
    """Fit, validate, test and fit again with one Trainer, then fit with a second."""
    module, recorder = LM(), Losses()
    loader = DataLoader(batches, batch_size=None)
    trainer = make_trainer(recorder, strategy=strategy, **options)
    trainer.fit(module, loader)
    report, traces = trainer.strategy.patch_report, [_traces(module)]
    (validation,), (test,) = (run(module, loader, verbose=False) for run in (trainer.validate, trainer.test))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    traces.append(_traces(module))
    same_report = trainer.strategy.patch_report is report
    second = make_trainer(recorder, strategy=strategy, **options)
    second.fit(module, loader)
    traces.append(_traces(module))
    return {
        **described(second.strategy, module.model, second.strategy.model),
        **{"losses": recorder.losses, "norms": [None], "evaluations": validation | test, "traces": traces},
        **{"num_replaced": report.num_replaced, "same_report": same_report},
    }


def _traces(module: nn.Module) -> dict[str, Any]:
    """What set-ups might leave in a model once more each time: classes, hooks, other parameters."""
    parts = list(module.model.modules())
    hooks = [len(value) for part in parts for name, value in vars(part).items() if name.endswith("_hooks") and value]
    names = [name for name, _ in module.model.named_parameters()]
    return {"classes": [type(part).__name__ for part in parts], "hooks": sum(hooks), "parameters": names}


def _lives(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a rank saw of the module's life under each engine, and under one after another."""
    batches = make_uneven_batches(run["rank"], NUM_LIFE_BATCHES)
    options = {"root": run["folder"], "accelerator": run["accelerator"], "devices": run["size"]}
    found = {f"life-{engine}": live(engine, batches, **options) for engine in ENGINES}
    for engines in MOVES:
        module, recorder = LM(), Losses()
        for engine in engines:
            trainer = make_trainer(recorder, strategy=engine, **options)
            trainer.fit(module, DataLoader(batches, batch_size=None))
        moved = described(trainer.strategy, module.model, trainer.strategy.model)
        found[f"move-{'-'.join(engines)}"] = {"losses": recorder.losses, "norms": [None], **moved}
    return found


def results(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        **{name: _fit(run, name, training) for name, training in (RUNS | FABRIC_RUNS).items()},
        "generated": _generate(run),
        "groups-of-one": fit(
            run,
            LigerFSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=_MESH[::-1]),
            LM(),
            make_batches(run["rank"], 1),
            may_fail=True,
        ),
        **_lives(run),
    }


# What is checked of them


@pytest.mark.parametrize("name", RUNS)
def test_ranks_train_as_one_process_with_the_stock_model(ranks, name):
    expected, run = reference_of(name, ranks.device), RUNS[name]
    # What wrong gradients could not pass: the model learned, from other batches on each rank, one without any label.
    assert run.is_plain or expected.losses[1][0] == 0.0
    assert min(expected.norms) > MAX_NORM
    found, head = ranks.of(name), CHANGES[run.change]().get_output_embeddings().weight
    assert_trained_as(expected, found, ranks.device)
    for result in found:
        assert len(result["norms"]) == len(expected.norms) == len(result["clipped"])
        assert result["num_replaced"] >= 10 if run.num_replaced is None else result["num_replaced"] == run.num_replaced
        assert result["logit_counts"] == ((0, 0) if run.num_replaced == 0 else (NUM_BATCHES, 0))
        if run.num_replaced != 0 and run.module is not OwnStep:  # the gradient of a frozen head is not computed
            assert result["head_needs_gradient"] == {"lora" not in run.change and head.requires_grad}
    # AdamW hardly notices the scale of gradients. Without sharding, each rank holds all of them.
    is_whole = "ddp" in name or "NO_SHARD" in name
    parts = [result["clipped"] for result in found][: 1 if is_whole else NUM_RANKS]
    clipped = [math.sqrt(sum(squares)) for squares in zip(*parts, strict=True)]
    torch.testing.assert_close(clipped, [MAX_NORM] * len(clipped), rtol=10 * TOLERANCE[ranks.device], atol=0.0)


@pytest.mark.parametrize("name", FABRIC_RUNS)
def test_ranks_train_with_fabric_as_one_process_with_the_stock_model(ranks, name):
    assert_trained_as(reference_of(name, ranks.device), ranks.of(name), ranks.device)
    for result in ranks.of(name):
        assert result["errors"] == [None] * NUM_BATCHES
        assert (result["num_replaced"], result["logit_counts"]) == (10, (NUM_BATCHES, 0))


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


@pytest.mark.parametrize("name", SAVED)
def test_full_checkpoint_is_the_gathered_model_and_loads_into_stock(ranks, name):
    saved = torch.load(ranks.folder / f"{name}.ckpt", weights_only=False, map_location="cpu")["state_dict"]
    saved = {key.removeprefix("model."): value for key, value in saved.items()}
    for result in ranks.of(name):
        for whole in (saved, result["whole_after_saving"]):
            torch.testing.assert_close(whole, result["whole"], rtol=0.0, atol=0.0)
    CHANGES[RUNS[name].change]().load_state_dict(saved)


def test_ranks_generate_with_fabric_once_the_method_is_marked(ranks):
    for result in ranks.of("generated"):
        assert "RuntimeError" in result["error"]
        assert result["tokens"].equal(result["stock"])


# The life of a module: fit, validate, test, predict and fit again


def plain_life(num_ranks: int, num_fits: int, device: str = "cpu") -> tuple[Reference, float]:
    """One process with the stock model, and its validation loss after the first fit."""
    batches = [make_uneven_batches(rank, NUM_LIFE_BATCHES) for rank in range(num_ranks)]
    first = build_model()
    reference_training(first, batches, device)
    loss = reference_training(first, batches, device, num_micro_batches=NUM_LIFE_BATCHES).mean  # before its one step
    return reference_training(build_model(), batches, device, num_fits=num_fits), loss


def assert_lived(found: list[dict[str, Any]], life: tuple[Reference, float], device: str = "cpu") -> None:
    expected, loss = life
    assert_trained_as(expected, found, device)
    for result in found:
        assert result["evaluations"]["val_loss"] == pytest.approx(loss, rel=TOLERANCE[device])
        assert result["evaluations"]["test_loss"] == result["evaluations"]["val_loss"]
        # Patched once, reported once, nothing added by later set-ups.
        assert (result["num_replaced"], result["same_report"]) == (10, True)
        assert result["traces"][1:] == result["traces"][:1] * 2
        # Three fits and two evaluations without logits.
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


if __name__ == "__main__":
    rank_main(results)
