"""Trainings under every engine, with Trainer and Fabric, that ``test_engines.py`` compares with one process."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from lightning_liger import (
    FabricLigerDDPStrategy,
    FabricLigerFSDPStrategy,
    LazyLogits,
    LigerDDPStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
)
from tests.lightning_liger.strategies.workers import lifecycle
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    NUM_RANKS,
    AddsToLoss,
    Batch,
    build_model,
    logit_counts,
    make_batches,
    make_optimizer,
    make_uneven_batches,
    regularized,
)
from tests.lightning_liger.strategies.workers.trainings import (
    Reference,
    error_of,
    fit,
    fit_with_fabric,
    loss_of_logits,
    rank_main,
    reference_training,
)

ENGINES = ("liger_ddp", "liger_fsdp", "liger_model_parallel")
NUM_BATCHES = 8
NUM_MICRO_BATCHES = 2
MAX_NORM = 0.2
"""Below the norm in every step of the tests."""
OFFLOAD = "liger_fsdp_cpu_offload"
UNUSED = "liger_ddp_find_unused_parameters_true"


def _freeze(model: nn.Module, *names: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(each in name for each in names))
    return model


def with_adapters(*layers: str, model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(8)
        # With the usual zeros in one of its factors, the other would get no gradient in the first step.
        return get_peft_model(model, LoraConfig(r=4, target_modules=list(layers), init_lora_weights=False))


def _with_unused(model: nn.Module) -> nn.Module:
    model.unused_layer = nn.Linear(3, 5)
    return model


CHANGES: dict[str, Callable[[], nn.Module]] = {
    "whole": build_model,
    "tied": lambda: build_model(tied=True),
    "head-only": lambda: _freeze(build_model(), "model."),
    "without-head": lambda: _freeze(build_model(), "lm_head"),
    # Frozen and trained parameters side by side, in each layer and around them.
    "mixed": lambda: _freeze(build_model(), "embed_tokens", "mlp"),
    "lora-attention": lambda: with_adapters("q_proj", "v_proj", model=build_model()),
    "lora-head": lambda: with_adapters("q_proj", "lm_head", model=build_model()),
    "partly-optimized": build_model,
    "unused": lambda: _with_unused(build_model()),
}
HAS_PEFT = importlib.util.find_spec("peft") is not None


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
        self.num_forwards = 0

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            self.model = CHANGES[self.change]()
            self.wrap(self.model)
            (mlp, *_) = [module for name, module in self.model.named_modules() if name.endswith("layers.0.mlp")]
            mlp.register_forward_pre_hook(self._count)

    def wrap(self, model: nn.Module) -> None:
        """What users do who shard a model themselves."""

    def _count(self, module: nn.Module, args: Any) -> None:
        self.num_forwards += 1

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
    """A training with the Trainer: a name or a strategy, what is trained, replaced modules, the class of the module."""

    strategy: Any
    change: str = "whole"
    num_replaced: int | None = 10
    module: type[Changed] = Changed
    options: dict[str, Any] = {}


FSDP, FSDP2 = LigerFSDPStrategy, LigerModelParallelStrategy
_MESH = (1, NUM_RANKS)
# 5 norms, 2 MLPs, 2 attentions and the head are replaced.
RUNS: dict[str, Run] = {
    **{
        f"{engine}-{change}": Run(engine, change, None if "lora" in change else 10)
        for engine in ENGINES
        for change in CHANGES
        if change != "unused" and (HAS_PEFT or "lora" not in change)
    },
    f"{OFFLOAD}-whole": Run(OFFLOAD),
    **({f"{OFFLOAD}-lora-head": Run(OFFLOAD, "lora-head", None)} if HAS_PEFT else {}),
    "ddp-find-unused": Run(UNUSED, "unused"),
    "ddp-static-graph": Run(partial(LigerDDPStrategy, static_graph=True), module=OwnStep),
    "ddp-own-step": Run("liger_ddp", "tied", module=OwnStep),
    "ddp-own-step-find-unused": Run(UNUSED, module=OwnStep),
    "fsdp-unused": Run("liger_fsdp", "unused"),
    "fsdp-no-kernels": Run(partial(FSDP, kernels="none"), num_replaced=0),
    "fsdp-NO_SHARD": Run(partial(FSDP, sharding_strategy="NO_SHARD")),
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


class FabricRun(NamedTuple):
    """A training with Fabric; each rank takes the mean over its own tokens."""

    strategy: Any
    change: str = "whole"
    loss_of: Any = None
    num_replaced: int = 10


FABRIC_RUNS: dict[str, FabricRun] = {
    **{
        f"fabric-{engine}-{change}-{kind}": FabricRun(engine, change, loss_of)
        for engine in ENGINES
        for change, kind, loss_of in (("whole", "labels", None), ("tied", "logits", loss_of_logits))
    },
    f"fabric-{OFFLOAD}": FabricRun(OFFLOAD),
    "fabric-ddp-find-unused": FabricRun(UNUSED, "unused", loss_of_logits),
    "fabric-ddp-frozen": FabricRun(UNUSED, "head-only"),
    "fabric-ddp-static-graph": FabricRun(partial(FabricLigerDDPStrategy, static_graph=True), loss_of=loss_of_logits),
    "fabric-fsdp-HYBRID_SHARD": FabricRun(
        partial(FabricLigerFSDPStrategy, sharding_strategy="HYBRID_SHARD", device_mesh=_MESH)
    ),
}


def reference(name: str, device: str) -> Reference:
    """What the run of that name is compared with."""
    run: Any = RUNS.get(name) or FABRIC_RUNS[name]
    is_plain = isinstance(run, FabricRun) or run.module is OwnStep
    make = make_batches if is_plain else make_uneven_batches
    return reference_training(
        CHANGES[run.change](),
        [make(rank, NUM_BATCHES) for rank in range(NUM_RANKS)],
        device,
        of_tokens=not is_plain,
        num_micro_batches=1 if is_plain else NUM_MICRO_BATCHES,
        max_norm=MAX_NORM,
        change=(lambda loss: loss) if is_plain else regularized,
        optimized=partial(is_optimized, run.change),
    )


def _fit(run: dict[str, Any], name: str) -> dict[str, Any]:
    strategy, change, _, module_class, options = RUNS[name]
    module, is_plain = module_class(change), module_class is OwnStep
    batches = (make_batches if is_plain else make_uneven_batches)(run["rank"], NUM_BATCHES)
    options = {
        "accumulate_grad_batches": 1 if is_plain else NUM_MICRO_BATCHES,
        "gradient_clip_val": MAX_NORM,
        **options,
    }
    made = strategy if isinstance(strategy, str) else strategy()
    result = fit(run, made, module, batches, save_as=f"{name}.ckpt" if OFFLOAD in name else None, **options)
    result |= {"clipped": module.clipped, "num_forwards": module.num_forwards}
    result["head_needs_gradient"] = set(module.head_needs_gradient)
    if name.startswith("fsdp2") or name == "liger_model_parallel-whole":
        loader = DataLoader(batches, batch_size=None)
        (result["validation"],) = result["trainer"].validate(module, loader, verbose=False)
        result["counts_after_validation"] = logit_counts(module)
    return result


def _fit_with_fabric(run: dict[str, Any], name: str) -> dict[str, Any]:
    strategy, change, loss_of, _ = FABRIC_RUNS[name]
    made = strategy if isinstance(strategy, str) else strategy()
    return fit_with_fabric(
        run,
        made,
        CHANGES[change](),
        make_batches(run["rank"], NUM_BATCHES),
        *([loss_of] if loss_of else []),
        after_backward=lambda fabric, model, optimizer: fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM),
    )


# Checkpoints of FSDP, and generation


def _checkpoints(run: dict[str, Any]) -> dict[str, Any]:
    def two(strategy: Any, **options: Any) -> dict[str, Any]:
        return fit(run, strategy, LM(), make_batches(run["rank"], 2), **options)

    found = {
        "untied": two("liger_fsdp", save_as="untied.ckpt"),
        "tied": fit(run, "liger_fsdp", LM(tied=True), make_batches(run["rank"], 2), save_as="tied.ckpt"),
    }
    for kind in ("full", "sharded"):
        path = run["folder"] / f"unstarted-{kind}.ckpt"
        two(LigerFSDPStrategy(state_dict_type=kind), save_as=path.name, max_steps=0)
        found[f"started-{kind}"] = two(LigerFSDPStrategy(state_dict_type=kind), ckpt_path=path)
    return found


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


def results(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        **{name: _fit(run, name) for name in RUNS},
        **{name: _fit_with_fabric(run, name) for name in FABRIC_RUNS},
        **_checkpoints(run),
        "generated": _generate(run),
        "groups-of-one": fit(
            run,
            LigerFSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=_MESH[::-1]),
            LM(),
            make_batches(run["rank"], 1),
            may_fail=True,
        ),
        **lifecycle.results(run, ENGINES),
    }


if __name__ == "__main__":
    rank_main(results)
