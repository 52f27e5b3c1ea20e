"""The worker that clips gradients on two processes in every way that ``test_clipping.py`` compares with one process.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import math
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_liger import (
    FabricLigerStrategy,
    LigerDDPStrategy,
    LigerModelParallelStrategy,
    LigerPrecisionPlugin,
    LigerStrategy,
)
from tests.lightning_liger.strategies.workers.distributed import (
    NUM_RANKS,
    Batch,
    build_model,
    make_optimizer,
    make_trainer,
    outside_loss,
)

NUM_BATCHES = 4
BROKEN_BATCH = 1
MAX_NORM = 0.5
"""Below the norm in every step of the tests."""
MAX_VALUE = 0.01

SHARDING = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "unused": {"unused": True},
    "partly-optimized": {"optimized": ".layers."},
}
ENGINES = {"ddp": LigerDDPStrategy, "model_parallel": LigerModelParallelStrategy}
"""Tested in addition to FSDP, which has the most special cases."""
MODELS_OF_ENGINES = ("untied", "frozen", "partly-optimized")
POLICIES = ("raise", "skip", "ignore")
CLIPPING: dict[str, dict[str, Any]] = {
    "unclipped": {},
    "norm": {"gradient_clip_val": MAX_NORM},
    "value": {"gradient_clip_val": MAX_VALUE, "gradient_clip_algorithm": "value"},
}
CLIPPING_OF_ENGINES = ("unclipped", "norm")
"""With gradients that are not finite."""


class ClippedLM(L.LightningModule):
    """The tiny model in steps without the mixin, noting norms before they are clipped (as logged) and after.

    Args:
        tied: Whether the head shares its weight with the embeddings.
        frozen: Whether the embeddings are not trained.
        unused: Whether there is a layer that gets no gradients.
        optimized: What the names of parameters contain that the optimizer gets.
        wrap: Wraps these modules of ``self.model``, as users can who do not want a single root.
    """

    def __init__(
        self,
        tied: bool = False,
        frozen: bool = False,
        unused: bool = False,
        optimized: str = "",
        wrap: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.tied, self.frozen, self.unused, self.optimized, self.wrap = tied, frozen, unused, optimized, wrap
        self.norms: list[float] = []
        self.local_squared_norms: list[float] = []
        self.largest_gradients: list[float] = []

    def configure_model(self) -> None:
        self.model = build_model(self.tied)
        self.model.get_input_embeddings().requires_grad_(not self.frozen)
        if self.unused:
            self.unused_layer = nn.Linear(3, 5)
        wrap_inside(self.model, self.wrap)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return outside_loss(self.model(batch["input_ids"]).logits, batch["input_ids"]) * batch["scale"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.optimized_parameters())

    def optimized_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.named_parameters() if self.optimized in name]

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        gradients = [parameter.grad for parameter in self.optimized_parameters() if parameter.grad is not None]
        gradients = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        self.norms.append(float(self.trainer.callback_metrics.get("grad_norm", math.nan)))
        self.local_squared_norms.append(sum(gradient.square().sum().item() for gradient in gradients))
        largest = (gradient.abs().max().item() for gradient in gradients if gradient.numel())
        self.largest_gradients.append(max(largest, default=0.0))


def wrap_inside(model: nn.Module, names: tuple[str, ...]) -> None:
    """Makes FSDP roots of the named children."""
    over_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if over_nccl else torch.device("cpu")
    if names:
        model.to(device)
    for name in names:
        setattr(model, name, FullyShardedDataParallel(getattr(model, name), use_orig_params=True, device_id=device))


def make_scaled_batches(rank: int, broken: bool = False) -> list[Batch]:
    """Batches of one rank, with as many labels on each; ``broken`` makes gradients of one not finite on rank 1."""
    generator = torch.Generator().manual_seed(200 + rank)
    batches = [
        {"input_ids": torch.randint(16, (2, 13), generator=generator), "scale": torch.ones(())}
        for _ in range(NUM_BATCHES)
    ]
    if broken and rank == 1:
        batches[BROKEN_BATCH]["scale"] = torch.tensor(math.inf)
    return batches


def whole_batches() -> list[Batch]:
    """What all ranks train on, for one process."""
    return [
        {"input_ids": torch.cat([part["input_ids"] for part in parts]), "scale": torch.ones(())}
        for parts in zip(*(make_scaled_batches(rank) for rank in range(NUM_RANKS)), strict=True)
    ]


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter, gathered from all ranks."""
    with ExitStack() as stack:
        for root in FullyShardedDataParallel.fsdp_modules(model, root_only=True):
            stack.enter_context(FullyShardedDataParallel.summon_full_params(root, writeback=False))
        return {
            name.replace("_fsdp_wrapped_module.", "").removeprefix("module.").removeprefix("model."): _whole(parameter)
            for name, parameter in model.named_parameters()
        }


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


# What one rank does


def _fit(
    run: dict[str, Any],
    strategy: dict[str, Any],
    module: dict[str, Any],
    broken: bool = False,
    engine: type[Strategy] = LigerStrategy,
    **options: Any,
) -> dict[str, Any]:
    lm = ClippedLM(**module)
    loader = DataLoader(make_scaled_batches(run["rank"], broken), batch_size=None)
    trainer = make_trainer(
        root=run["folder"],
        strategy=engine(**strategy),
        accelerator=run["accelerator"],
        devices=NUM_RANKS,
        **options,
    )
    error = _error_of(partial(trainer.fit, lm, loader))
    return {
        "error": error,
        "norms": lm.norms,
        "local_squared_norms": lm.local_squared_norms,
        "largest_gradients": lm.largest_gradients,
        "whole": None if error else whole_parameters(trainer.strategy.model),
    }


def _error_of(function: Callable[[], Any]) -> str | None:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _fabric(
    run: dict[str, Any],
    wrap: tuple[str, ...] = (),
    broken: bool = False,
    use_orig_params: bool = True,
    **clipping: Any,
) -> dict[str, Any]:
    strategy = FabricLigerStrategy(kernels="none" if wrap else "auto", use_orig_params=use_orig_params)
    fabric = L.Fabric(strategy=strategy, accelerator=run["accelerator"], devices=NUM_RANKS)
    fabric.launch()
    model = build_model()
    wrap_inside(model, wrap)
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
    norms, errors = [], []

    def clip() -> None:
        norms.append(fabric.clip_gradients(model, optimizer, **clipping))

    for batch in make_scaled_batches(run["rank"], broken):
        batch = {name: tensor.to(fabric.device) for name, tensor in batch.items()}
        optimizer.zero_grad()
        fabric.backward(outside_loss(model(batch["input_ids"]).logits, batch["input_ids"]) * batch["scale"])
        errors.append(_error_of(clip))
        if errors[-1] is None:
            optimizer.step()
    return {
        "errors": errors,
        "norms": [None if norm is None else norm.item() for norm in norms],
        "whole": whole_parameters(model._forward_module),
    }


def _run_rank(device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    run = {"rank": int(os.environ["RANK"]), "folder": folder, "accelerator": {"cuda": "gpu"}.get(device, device)}
    by_norm, by_value = CLIPPING["norm"], CLIPPING["value"]
    results: dict[str, Any] = {}
    for sharding in SHARDING:
        hybrid = {"device_mesh": init_device_mesh(device, (1, NUM_RANKS))} if "HYBRID" in sharding else {}
        results[sharding] = _fit(run, {"sharding_strategy": sharding, **hybrid}, {}, **by_norm)
    for name, module in MODELS.items():
        results[name] = _fit(run, {}, module, **by_norm)
    results["accumulated"] = _fit(run, {}, {}, accumulate_grad_batches=2, **by_norm)
    results["value"] = _fit(run, {}, {}, **by_value)
    # A fused loss needs the head's weight after the head has run, when a separate root has freed it.
    results["roots"] = _fit(run, {"kernels": "none"}, {"wrap": ("model", "lm_head")}, **by_norm)
    results["outside"] = _fit(run, {"kernels": "none"}, {"wrap": ("model",)}, **by_norm)
    scaler = ShardedGradScaler(device=device, init_scale=64.0)
    results["16-mixed"] = _fit(run, {"precision_plugin": LigerPrecisionPlugin("16-mixed", scaler)}, {}, **by_norm)
    for policy in POLICIES:
        for clipping, options in CLIPPING.items():
            results[f"{policy}-{clipping}"] = _fit(run, {"on_nonfinite_grad": policy}, {}, broken=True, **options)
    for name, engine in ENGINES.items():
        for model in MODELS_OF_ENGINES:
            results[f"{name}-{model}"] = _fit(run, {}, MODELS[model], engine=engine, **by_norm)
        results[f"{name}-accumulated"] = _fit(run, {}, {}, engine=engine, accumulate_grad_batches=2, **by_norm)
        results[f"{name}-value"] = _fit(run, {}, {}, engine=engine, **by_value)
        for policy in POLICIES:
            for clipping in CLIPPING_OF_ENGINES:
                options = {"engine": engine, **CLIPPING[clipping]}
                broken = _fit(run, {"on_nonfinite_grad": policy}, {}, broken=True, **options)
                results[f"{name}-{policy}-{clipping}"] = broken
    results["fabric"] = _fabric(run, max_norm=MAX_NORM)
    results["fabric-flat"] = _fabric(run, use_orig_params=False, max_norm=MAX_NORM)
    results["fabric-roots"] = _fabric(run, wrap=("model", "lm_head"), max_norm=MAX_NORM)
    results["fabric-value"] = _fabric(run, clip_val=MAX_VALUE)
    results["fabric-raise"] = _fabric(run, broken=True, max_norm=MAX_NORM)
    results["fabric-ignore"] = _fabric(run, broken=True, max_norm=MAX_NORM, error_if_nonfinite=False)
    torch.save(results, folder / f"rank{run['rank']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
