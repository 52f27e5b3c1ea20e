"""Counted allocations of real training on two CPU processes under each engine, for estimates to be compared with.

Every operation passes a dispatch mode, which adds up the storages that exist: engines resize storages, so their present
sizes are taken. What a collective allocates inside is not seen.
"""

import os
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_liger import LigerDDPStrategy, LigerDeepSpeedStrategy, LigerFSDPStrategy, LigerModelParallelStrategy
from lightning_liger.activations.frames import tensors_in
from lightning_liger.training.lora import add_adapters
from tests.lightning_liger.strategies.workers.distributed import skip_shared_memory_op
from tests.lightning_liger.tiny import quiet_trainer

CONFIG = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 8, "vocab_size": 3000, "use_cache": False,
}  # fmt: skip
NUM_TOKENS, BUCKET_SIZE, LORA = 16, 10**6, {"r": 4}
TIED = {"tie_word_embeddings": True}
ENGINES: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "ddp": ("ddp", "bf16-true", {}, False),
    "fsdp mixed": ("fsdp", "bf16-mixed", {}, False),
    "fsdp lora": ("fsdp", "bf16-true", {}, True),
    "fsdp2": ("fsdp2", "bf16-true", TIED, False),
    **({} if find_spec("deepspeed") is None else {
        "zero 2": ("deepspeed_stage_2", "bf16-true", TIED, False),
        "zero 2 float32": ("deepspeed_stage_2", "32-true", {}, False),
        "zero 3": ("deepspeed_stage_3", "bf16-true", {}, False),
    }),
}  # fmt: skip
"""The strategy, the precision, settings of the model, and whether adapters alone are trained."""


class Counter(TorchDispatchMode):
    """The peak of bytes of the storages that operations made inside of its context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tensors_in((result, args)):
            if value.device.type == "cpu":
                self._live.add(getattr(value, "_local_tensor", value).untyped_storage())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._live))
        return result


class Module(L.LightningModule):
    def __init__(self, settings: dict[str, Any], with_adapters: bool, counter: Counter) -> None:
        super().__init__()
        self.settings, self.with_adapters, self.counter = settings, with_adapters, counter
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG, **self.settings))
            self.model = add_adapters(model, LORA) if self.with_adapters else model

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:  # from then on the optimizer has its states
            self.counter.peak = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], fused=True)


def make_strategy(name: str) -> Any:
    if name.startswith("deepspeed"):
        skip_shared_memory_op()
        zero = {
            "stage": int(name[-1]), "reduce_bucket_size": BUCKET_SIZE, "overlap_comm": True,
            "contiguous_gradients": True, "stage3_param_persistence_threshold": 10, "sub_group_size": 10**12,
            "stage3_prefetch_bucket_size": 10**5,
        }  # fmt: skip
        return LigerDeepSpeedStrategy(config={"zero_optimization": zero, "zero_allow_untested_optimizer": True})
    return {"ddp": LigerDDPStrategy, "fsdp": LigerFSDPStrategy, "fsdp2": LigerModelParallelStrategy}[name]()


def count(name: str, folder: Path) -> int:
    """The bytes at the peak of a step on this rank."""
    strategy, precision, settings, with_adapters = ENGINES[name]
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
    with Counter() as counter:
        trainer = quiet_trainer(
            devices=2, strategy=make_strategy(strategy), precision=precision, max_steps=3,
            default_root_dir=folder,
        )  # fmt: skip
        batches = DataLoader([{"input_ids": ids, "labels": ids}] * 4, batch_size=None)
        trainer.fit(Module(settings, with_adapters, counter), batches)
        return counter.peak


def _run_rank(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.save({name: count(name, folder) for name in ENGINES}, folder / f"rank{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_rank(Path(sys.argv[2]))
