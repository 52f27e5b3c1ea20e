"""One process that trains a job: reads it from standard input and writes a line of results for each shape.

    python -m benchmarks.training.worker < job.json

It imports everything before it reads, so that it can be started while another job runs.
"""

import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.timing import GpuTrace, synchronize
from benchmarks.training.arms import FLOAT8
from benchmarks.training.dims import DIMS, make_model
from benchmarks.training.job import FAILED, OPTIMIZERS, OUT_OF_MEMORY, Job, Row
from benchmarks.training.medusa_heads import COEFFICIENT, DECAY, HEAD_LOSSES, medusa_loss
from liger_ops.optim import AdamW
from lightning_liger import (
    Float8Recipe,
    LigerDDPStrategy,
    LigerDeepSpeedStrategy,
    LigerFSDPStrategy,
    LigerLMMixin,
    LigerMedusaMixin,
    LigerModelParallelStrategy,
    LigerSingleDeviceStrategy,
    MedusaHeads,
)
from lightning_liger.activations.layers import find_layers, unsplit_classes
from lightning_liger.data import TextDataModule
from lightning_liger.estimate.states import PRECISIONS
from lightning_liger.patching.float8 import fp8_share
from lightning_liger.training.causal_lm import needs_float32_moments
from lightning_liger.training.lora import add_adapters
from lightning_liger.weights.meta_device import initialize

GIB = 2**30


class PlainFSDPStrategy(FSDPStrategy):
    """Lightning's strategy, wrapping the layers that LigerFSDPStrategy chooses by default."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        from lightning.fabric.strategies.fsdp import _auto_wrap_policy_kwargs

        self.kwargs = _auto_wrap_policy_kwargs(unsplit_classes(model), self.kwargs)
        return super()._setup_model(model)


_STRATEGIES: dict[str, tuple[type[Any], type[Any]]] = {
    "ddp": (LigerDDPStrategy, DDPStrategy),
    "fsdp": (LigerFSDPStrategy, PlainFSDPStrategy),
    "fsdp2": (LigerModelParallelStrategy, PlainFSDPStrategy),
    "deepspeed": (LigerDeepSpeedStrategy, DeepSpeedStrategy),
}
"""Ours and Lightning's, which here has FSDP1 in the place of FSDP2."""
_EVERY_LINEAR: dict[str, Any] = {"filter": lambda module, name: True, "min_tokens": 1}


def make_strategy(job: Job, device: torch.device) -> Strategy:
    """The strategy of an arm: Lightning's own for the others, on one device or with FSDP."""
    arm, single = job.parsed_arm, job.devices == 1
    arguments = arm.strategy_arguments if arm.is_ours else {}
    if arm.implementation in FLOAT8:
        settings = FLOAT8[arm.implementation] | (_EVERY_LINEAR if job.every_linear_fp8 or job.tiny else {})
        arguments["fp8"] = Float8Recipe(**settings) if settings else "auto"
    if job.strategy:
        name, _, stage = job.strategy.partition("_stage_")
        return _STRATEGIES[name][0 if arm.is_ours else 1](**({"stage": int(stage)} if stage else {}), **arguments)
    if arm.implementation == "hf_fsdp2":
        return ModelParallelStrategy(data_parallel_size=job.devices, tensor_parallel_size=1)
    if not arm.is_ours:
        return SingleDeviceStrategy(device) if single else PlainFSDPStrategy()
    if arm.implementation == "ours_fsdp2_ep":
        return LigerModelParallelStrategy(expert_parallel_size=job.devices, **arguments)
    if arm.implementation.startswith("ours_fsdp2"):
        return LigerModelParallelStrategy(**arguments)
    if single:
        return LigerSingleDeviceStrategy(**arguments)
    return LigerFSDPStrategy(context_parallel_size=job.context_parallel_size, **arguments)


def apply_liger_kernel(model: nn.Module) -> None:
    """Patches a model by the liger-kernel package."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


class BenchmarkLM(L.LightningModule):
    """A model with random weights, trained on the loss that its forward returns."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        job, arm = self.job, self.job.parsed_arm
        config = DIMS[job.model].config(job.layers, job.tiny)
        if job.vocab_size is not None:
            config.vocab_size = job.vocab_size
        dtype = PRECISIONS[job.precision].weights
        is_sharded = isinstance(self.trainer.strategy, ModelParallelStrategy)
        on_meta = is_sharded and DIMS[job.model].needs_meta
        device = torch.device("meta") if on_meta else self.trainer.strategy.root_device
        self.model = make_model(config, device, dtype, job.seed)
        if job.lora_rank:
            self.model = add_adapters(self.model, {"r": job.lora_rank, **DIMS[job.model].lora})
        if arm.recomputes_all:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if is_sharded and not arm.is_ours:
            self._shard()
        if arm.implementation == "liger_kernel":
            apply_liger_kernel(self.model)
        if arm.implementation == "hf_compiled":
            for layer in find_layers(self.model):
                layer.compile()

    def _shard(self) -> None:
        """What users of Lightning's own strategy write, and the values that our strategies give such a model."""
        assert self.model is not None
        assert self.device_mesh is not None  # of the strategy
        layers = tuple(unsplit_classes(self.model))
        units = [module for module in self.model.modules() if isinstance(module, layers)]
        for unit in (*units, self.model):
            fully_shard(unit, mesh=self.device_mesh["data_parallel"])
        initialize(self, self.trainer.strategy.root_device, [self.model, *units])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        job = self.job
        make = torch.optim.SGD if job.optimizer == "sgd" else torch.optim.AdamW
        state_dtype = OPTIMIZERS[job.optimizer]
        on_gpu = self.trainer.strategy.root_device.type == "cuda"
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if make is torch.optim.AdamW and job.parsed_arm.is_ours:
            betas = (0.9, 0.95 if job.pretrains else 0.999)
            groups: Any = trained
            if state_dtype is not None:
                dtypes = (state_dtype, False), ("float32", True)
                wide = [module for module in self.modules() if state_dtype == "8bit" and needs_float32_moments(module)]
                exact = {each for module in wide for each in module.parameters(recurse=False)}
                parts = {dtype: [p for p in trained if (p in exact) == is_exact] for dtype, is_exact in dtypes}
                groups = [{"params": params, "state_dtype": dtype} for dtype, params in parts.items() if params]
            optimizer: torch.optim.Optimizer = AdamW(
                groups, lr=job.learning_rate, betas=betas, stochastic_rounding=state_dtype is not None
            )
        else:
            optimizer = make(trained, lr=job.learning_rate, fused=on_gpu)
        if not job.learning_rate_warm_up:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(
                (step + 1) / job.learning_rate_warm_up,
                max(0.0, 1.0 - step / job.steps) if job.pretrains else 1.0,
            ),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SplitSequencesLM(LigerLMMixin, BenchmarkLM):
    """The same model with the steps of the mixin, which split sequences over ranks."""

    training_step = LigerLMMixin.training_step


class MedusaLM(BenchmarkLM):
    """The same model with Medusa's heads, and a loop over them."""

    def configure_model(self) -> None:
        if self.model is not None:
            return
        super().configure_model()
        self.medusa_heads = MedusaHeads.of(self.model, self.job.medusa_heads)
        self.model.requires_grad_(self.job.medusa_stage == 2)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        head_loss = HEAD_LOSSES[self.job.parsed_arm.implementation]
        return medusa_loss(self.model, self.medusa_heads, batch["input_ids"], self.job.medusa_stage, head_loss)


class OurMedusaLM(LigerMedusaMixin, MedusaLM):
    """The same with the steps of our mixin."""

    medusa_decay_coefficient = DECAY
    medusa_heads_coefficient = COEFFICIENT

    def __init__(self, job: Job) -> None:
        self.medusa_only_heads = job.medusa_stage == 1
        super().__init__(job)


class Feed:
    """Batches without end, whose shape can change at any time.

    Attributes:
        shape: ``(batch size, tokens per sequence)`` of the next batch.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.shape = job, job.shapes[0]
        self._rank = rank // job.context_parallel_size
        self._vocab_size = job.vocab_size or DIMS[job.model].config(job.layers, job.tiny).vocab_size
        self._rows = iter(self._text()) if job.text_cache else None

    def __len__(self) -> int:
        return 10**9  # Lightning reads a batch ahead if it does not know the length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in itertools.count():
            batch_size, length = self.shape
            if self._rows is None:
                generator = torch.Generator().manual_seed(self.job.seed + 1000 * self._rank + number % 2)
                ids = torch.randint(3, self._vocab_size, (batch_size, length), generator=generator)
            else:
                ids = torch.stack(list(itertools.islice(self._rows, batch_size)))
            ids = ids.flip(0) if self.job.permute_rows else ids
            ids = ids.pin_memory() if torch.cuda.is_available() else ids
            yield {"input_ids": ids, "labels": ids}

    def held_out(self) -> Iterator[Tensor]:
        """Batches of text that is not trained on."""
        rows = itertools.islice(text(self.job, self.shape[1]).validation_data, self.job.held_out_rows)
        ids = torch.stack([torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows])
        yield from ids.split(self.shape[0])

    def _text(self) -> Iterator[Tensor]:
        """Rows of text in a random order that is the same in every job."""
        rows = text(self.job, self.shape[1]).train_data
        for epoch in itertools.count():
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.job.seed + epoch)).tolist()
            for place in order[self._rank :: self.job.devices // self.job.context_parallel_size]:
                yield torch.as_tensor(rows[place]["input_ids"], dtype=torch.int64)


def text(job: Job, length: int) -> TextDataModule:
    """Rows of source code, tokenized once."""
    package = job.text_package and importlib.util.find_spec(job.text_package)
    data = TextDataModule(
        path=os.path.dirname(package.origin) if package and package.origin else None,
        vocab_size=job.vocab_size,
        block_size=length,
        batch_size=1,
        cache_dir=job.text_cache,
        max_documents=10 if job.tiny else None,
    )
    data.prepare_data()
    data.setup("fit")
    return data


class Meter(L.Callback):
    """Measures steps of each shape, one shape after another, then ends training.

    Args:
        job: The job.
        feed: Its batches.
        write: Called with each row, at once.
        leave: Called when all shapes are measured, or training failed. By default training ends in the usual way.
    """

    def __init__(
        self, job: Job, feed: Feed, write: Callable[[Row], None], leave: Callable[[], None] | None = None
    ) -> None:
        self.job, self.feed, self._write, self._leave = job, feed, write, leave
        self._shapes = iter(job.shapes)
        self._start = time.perf_counter()
        self._error: BaseException | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device
        self._cuda = device.type == "cuda"
        if self._cuda and self.job.memory_limit_gib:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.job.memory_limit_gib * GIB / total), device)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.job.states_first:
            (optimizer,) = trainer.optimizers
            for parameter in pl_module.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        self._next_shape(trainer)

    def _next_shape(self, trainer: L.Trainer) -> None:
        shape = next(self._shapes, None)
        if shape is None:
            self._finish(trainer)
            return
        self.feed.shape = shape
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._marks: list[Any] = []
        self._shape_start = time.perf_counter()
        self._first_step: float | None = None
        self._trace: GpuTrace | None = None
        self._highest = 0
        if self._cuda:
            torch.cuda.empty_cache()  # what another shape left must not be in the way
            torch.cuda.reset_peak_memory_stats()
        if not self.job.warm_up:
            self._marks.append(self._now())

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if self.job.held_out_rows:  # not where steps are timed
            gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
            self._norms.append(nn.utils.get_total_norm(gradients))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(outputs["loss"].detach())
        if len(self._marks) <= self.job.steps:
            self._mark()
        if self._first_step is None:
            synchronize(trainer.strategy.root_device)
            self._first_step = time.perf_counter() - self._shape_start
        if len(self._marks) <= self.job.steps:
            return
        if self._cuda and self._trace is None and self.job.traced_steps:
            self._trace = GpuTrace(trainer.strategy.root_device)
        if self._trace is None or len(self._losses) == self.job.warm_up + self.job.steps + self.job.traced_steps:
            self._write(self._row(trainer, pl_module))
            self._next_shape(trainer)

    def _mark(self) -> None:
        """Notes the end of a step, unless it and the next one are of the warm-up."""
        if not self._marks:
            if len(self._losses) < self.job.warm_up:
                return
            if self._cuda:
                self._highest = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()
        self._marks.append(self._now())

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _row(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Row:
        if self._cuda:
            torch.cuda.synchronize()
        seconds = [
            start.elapsed_time(end) / 1e3 if self._cuda else end - start
            for start, end in itertools.pairwise(self._marks)
        ]
        losses = torch.stack(self._losses).tolist()
        batch_size, length = self.feed.shape
        tokens = batch_size * length / self.job.context_parallel_size
        memory: dict[str, float] = {}
        if self._cuda:
            peak = torch.cuda.max_memory_allocated()
            planning_peak = getattr(trainer.strategy, "peak_before_resets", 0)
            memory = {
                "peak_gib": max(self._highest, peak, planning_peak) / GIB,
                "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            }
        return self.job.row(
            *self.feed.shape,
            step_seconds=seconds,
            first_step_seconds=self._first_step,
            tokens_per_second=tokens / statistics.median(seconds),
            parameters_gib=sum(local(parameter).nbytes for parameter in pl_module.parameters()) / GIB,
            optimizer_gib=sum(
                local(state).nbytes
                for states in trainer.optimizers[0].state.values()
                for state in states.values()
                if isinstance(state, Tensor)
            )
            / GIB,
            chosen_plan=chosen_plan(trainer.strategy),
            loss=losses[-1],
            losses=losses,
            gradient_norms=torch.stack(self._norms).tolist() if self._norms else [],
            idle_share=None if self._trace is None else self._trace.idle_share(),
            fp8_share=fp8_share(pl_module),
            held_out_loss=self._held_out_loss(trainer, pl_module.model),
            seconds=time.perf_counter() - self._start,
            **memory,
        )

    def _held_out_loss(self, trainer: L.Trainer, model: nn.Module) -> float | None:
        """The mean loss of evaluation over rows of text that was held out."""
        if not self.job.held_out_rows:
            return None
        losses = []
        model.eval()
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            for batch in self.feed.held_out():
                ids = batch.to(trainer.strategy.root_device)
                losses += [model(input_ids=ids, labels=ids).loss.float()] * len(ids)
        model.train()
        return torch.stack(losses).mean().item()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.fail(exception)

    def fail(self, error: BaseException) -> None:
        """Writes a row that says why the present shape was not measured, and leaves; a second call does nothing."""
        if self._error is not None:
            return
        self._error = error
        status = OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
        lines = str(error).strip().splitlines() or [""]
        row = self.job.row(*self.feed.shape, status=status, error=f"{type(error).__name__}: {lines[0]}"[:500])
        self._write(row)
        if self._leave is not None:
            self._leave()

    def _finish(self, trainer: L.Trainer) -> None:
        trainer.should_stop = True
        if self._leave is not None:
            if dist.is_initialized():
                dist.barrier()  # another rank may still need what this one sends
            self._leave()


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is that memory ran out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def chosen_plan(strategy: Any) -> str | None:
    """The plan for activations in the words of the strategy."""
    return getattr(strategy, "activation_plan", None) or None


def module_of(job: Job) -> type[BenchmarkLM]:
    """The class that trains a job."""
    if job.medusa_heads:
        return OurMedusaLM if job.parsed_arm.is_ours else MedusaLM
    return BenchmarkLM if job.context_parallel_size == 1 else SplitSequencesLM


def run_job(job: Job, write: Callable[[Row], None], leave: Callable[[], None] | None = None) -> None:
    """Trains in this process, which is one of the job's; ``write`` gets a row for each shape."""
    cuda = torch.cuda.is_available()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    feed = Feed(job, rank)
    meter = Meter(job, feed, write, leave)
    try:
        trainer = L.Trainer(
            accelerator="cuda" if cuda else "cpu",
            devices=job.devices,
            strategy=make_strategy(job, torch.device("cuda", 0) if cuda else torch.device("cpu")),
            precision=job.precision,
            gradient_clip_val=1.0 if job.pretrains else None,
            max_epochs=1,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[meter],
        )
        trainer.fit(module_of(job)(job), feed)
    except Exception as error:  # a row of the results, for the other arms go on
        meter.fail(error)


def main() -> None:
    text = sys.stdin.readline()
    if not text.strip():
        return  # started ahead for a job that does not come
    task = json.loads(text)
    job = Job.from_json(task["job"])
    if job.devices > 1:
        os.environ["MASTER_PORT"] = str(task["port"])
    out = Path(f"{task['out']}.{os.environ.get('LOCAL_RANK', '0')}")

    def write(row: Row) -> None:
        with out.open("a", encoding="utf-8") as file:
            file.write(row.to_json() + "\n")

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # Lightning would move the model and the optimizer's states to the CPU first

    run_job(job, write, leave)


if __name__ == "__main__":
    main()
