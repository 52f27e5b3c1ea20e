"""A tiny model and its data, modules and trainers for it, and how ranks are started."""

import functools
import gc
import itertools
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_liger import LigerLMMixin
from tests.lightning_liger.tiny import quiet_trainer

ROOT = Path(__file__).parents[4]
NUM_RANKS = 4 if torch.cuda.device_count() >= 4 else 2
NUM_STEPS = 20
VOCAB_SIZE = 97
HEADS = {"untied": False, "tied": True}
"""Whether the LM head shares its weight with the embeddings."""

Batch = dict[str, Tensor]


def build_model(tied: bool = False) -> LlamaForCausalLM:
    """A Llama whose layers have an odd number of parameters, so shards are uneven; the same one each time."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=33,
        head_dim=8,
        intermediate_size=45,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # GPUs draw other numbers
        torch.manual_seed(7)
        return LlamaForCausalLM(config).train()


def make_batches(rank: int, num_batches: int = NUM_STEPS) -> list[Batch]:
    """Batches of one rank: different on each, with a different number of ignored labels, few tokens to be learned."""
    generator = torch.Generator().manual_seed(100 + rank)
    batches = []
    for _ in range(num_batches):
        input_ids = torch.randint(16, (2, 13), generator=generator)
        labels = input_ids.clone()
        labels[:, : 1 + 3 * rank] = -100
        batches.append({"input_ids": input_ids, "labels": labels})
    return batches


def make_uneven_batches(rank: int, num_batches: int = NUM_STEPS) -> list[Batch]:
    """The same where every third batch of the second rank has no labels."""
    batches = make_batches(rank, num_batches)
    for index in range(0, num_batches, 3):
        if rank == 1:
            batches[index]["labels"][:] = -100
    return batches


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def make_loader(rank: int, num_batches: int = NUM_STEPS) -> DataLoader[Batch]:
    return DataLoader(make_batches(rank, num_batches), batch_size=None)


def outside_loss(logits: Any, labels: Tensor) -> Tensor:
    """The loss of next tokens, as a user writes it by hand."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB_SIZE), labels[:, 1:].reshape(-1))


def regularized(loss: Tensor) -> Tensor:
    """What a user makes of the loss of a micro-batch: its gradient is not that of the loss times a number."""
    return loss + 0.1 * loss.square()


class LM(LigerLMMixin, L.LightningModule):
    """The tiny model, or what ``build`` makes in the place of it, with the mixin's own steps."""

    def __init__(self, tied: bool = False, build: Callable[[Any], nn.Module] | None = None) -> None:
        super().__init__()
        self.tied = tied
        self.build = build or (lambda module: build_model(tied))

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            self.model = self.build(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


class AddsToLoss(LM):
    """Adds a term to the mixin's loss, and has a hook without ``super()``."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return regularized(super().training_step(batch, batch_idx))

    def on_after_backward(self) -> None:
        pass


class KindsOfLogits(LM):
    """Notes what the head returns in each stage, in steps without the mixin."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, type] = {}

    def training_step(self, batch, batch_idx):
        logits = self.model(batch["input_ids"]).logits
        self.kinds[self.trainer.state.stage.dataloader_prefix] = type(logits)
        return outside_loss(logits, batch["labels"])

    validation_step = test_step = predict_step = training_step


class Losses(L.Callback):
    """Keeps the loss of each step, of this rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def make_trainer(*callbacks: L.Callback, root: Path, **options: Any) -> L.Trainer:
    """A silent Trainer; on one CPU process unless told otherwise."""
    defaults = {"max_epochs": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 1, "use_distributed_sampler": False}
    return quiet_trainer(callbacks=list(callbacks), default_root_dir=root, **{**defaults, **options})


def launched_fabric(strategy: Any, **options: Any) -> L.Fabric:
    """A Fabric on one CPU process."""
    fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=1, **options)
    fabric.launch()
    return fabric


def wrapped_units(model: nn.Module) -> dict[str, str]:
    """Name and class of each FSDP unit of ``model``; the root's name is empty."""
    return {
        name.replace("_fsdp_wrapped_module.", "").removeprefix("_forward_module."): type(module.module).__name__
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    }


def logit_counts(model: nn.Module) -> tuple[int, int]:
    """How often the loss came without whole logits, and how often whole logits were needed."""
    ledgers = [vars(module)["fusion_counters"] for module in model.modules() if "fusion_counters" in vars(module)]
    return sum(ledger.num_losses for ledger in ledgers), sum(ledger.num_materialized for ledger in ledgers)


# How ranks are started

_PORTS_PER_WORKER = 400


def skip_shared_memory_op() -> None:
    """DeepSpeed would compile it with the C++ compiler that it finds, for over a minute."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def python_path() -> str:
    """For processes that tests start: this project first, then what the tests themselves were started with."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *([inherited] if inherited else [])])


def free_port() -> int:
    """A port below those of outgoing connections, and out of the way of tests in other processes."""
    first = 20000 + _PORTS_PER_WORKER * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for _ in range(_PORTS_PER_WORKER):
        port = first + (os.getpid() + next(_port_numbers)) % _PORTS_PER_WORKER
        with socket.socket() as candidate:
            if candidate.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError(f"no free port in {first} to {first + _PORTS_PER_WORKER - 1}")


_port_numbers = itertools.count()


PRELOADED = ("tests.lightning_liger.strategies.workers.trainings", "deepspeed", "peft", "pytest")
"""What ranks on CPUs find imported."""


@functools.cache
def _context(device: str) -> Any:
    """How ranks are started: on CPUs forked from a process that has only imported, which takes longer than runs."""
    if device != "cpu":  # a fork cannot use what its parent may know of GPUs
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with mock.patch.dict(os.environ, PYTHONPATH=python_path(), DS_ACCELERATOR=device):
        forkserver.ensure_running()
    return context


def launch(
    device: str,
    folder: Path,
    worker: str,
    timeout: float = 280.0,
    num_ranks: int = NUM_RANKS,
    environment_of: Callable[[int], dict[str, str]] = lambda rank: {},
) -> list[dict[str, Any]]:
    """What ``worker``, run as a module with ``device`` and ``folder`` as arguments, saved on each rank.

    If one fails, all end and the error shows what they wrote to stderr.
    ``environment_of`` a rank changes what torchrun would set for it on one node; empty values are not set at all.
    """
    shared = {
        "PYTHONPATH": python_path(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "liger-tests",
        "DS_ACCELERATOR": device,
    }
    outputs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
    processes = []
    try:
        for rank, output in enumerate(outputs):
            of_rank = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment_of(rank)}
            environment = {**os.environ, **{name: value for name, value in of_rank.items() if value}}
            arguments = ([worker, device, str(folder)], environment, output)
            processes.append(_context(device).Process(target=_run, args=arguments))
            with mock.patch.dict(os.environ, environment):  # which imports of spawned ranks read
                processes[-1].start()
        codes = _wait(processes, timeout)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    if any(codes):
        logs = "\n".join(f"--- rank {rank}\n{log.read_text()[-12000:]}" for rank, log in enumerate(outputs))
        raise AssertionError(f"ranks ended with {codes} (None: killed after another failed, or {timeout} s)\n{logs}")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _run(argv: list[str], environment: dict[str, str], output: Path) -> None:
    """One rank, in a process for it alone."""
    gc.freeze()  # what was imported stays, and looking through it would take long in each collection
    os.environ.clear()
    os.environ.update(environment)
    with output.open("w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def _wait(processes: list[Any], timeout: float) -> list[int | None]:
    """Exit codes once all have ended well, or one has not, or time is up."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.exitcode for process in processes]
        if None not in codes or any(codes):
            return codes
        if time.monotonic() > deadline:
            return [code if code is not None else -signal.SIGKILL for code in codes]
        time.sleep(0.1)


def torchrun_environment(rank: int) -> dict[str, str]:
    """What ``torchrun`` sets on two nodes of one machine, with the GPUs of each as if it had no others."""
    num_devices = NUM_RANKS // 2
    node, local_rank = divmod(rank, num_devices)
    return {
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(num_devices),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "CUDA_VISIBLE_DEVICES": ",".join(str(node * num_devices + device) for device in range(num_devices)),
    }
