"""Adapters over quantized weights that are sharded, or whole on each rank: two ranks train as one process, and their
checkpoints resume and merge.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.imports import package_available
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_liger import (
    LigerCausalLM,
    LigerDDPStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
    export_pretrained,
)
from lightning_liger.weights.export import _read, contents
from tests.lightning_liger.strategies.workers.distributed import launch
from tests.lightning_liger.tiny import quiet_trainer, tiny_batch, tiny_llama

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
INT8 = {"load_in_8bit": True}
TORCHAO = {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}
LORA = {"r": 4, "alpha": 8, "target_modules": "all-linear"}
NUM_ELEMENTS = 73_728
"""Of the quantized weights of the tiny model."""


def file_of_fsdp2() -> LigerModelParallelStrategy:
    return LigerModelParallelStrategy(save_distributed_checkpoint=False, activation_checkpointing="full")


RUNS: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "fsdp": (LigerFSDPStrategy, "32-true", NF4),
    "fsdp2": (LigerModelParallelStrategy, "32-true", NF4),
    "fsdp2-file": (file_of_fsdp2, "32-true", NF4),
    "fsdp-bf16": (LigerFSDPStrategy, "bf16-true", NF4),
    "fsdp2-bf16": (LigerModelParallelStrategy, "bf16-mixed", NF4),
    "torchao-ddp": (LigerDDPStrategy, "32-true", TORCHAO),
    "torchao-fsdp2": (LigerModelParallelStrategy, "32-true", TORCHAO),
    "torchao-fsdp2-file": (file_of_fsdp2, "32-true", TORCHAO),
    "torchao-fsdp2-bf16": (LigerModelParallelStrategy, "bf16-true", TORCHAO),
}
REFUSED: dict[str, tuple[Callable[[], Any], str, dict[str, Any], str]] = {
    "8 bits": (LigerModelParallelStrategy, "32-true", INT8, "4 bits of bitsandbytes"),
    "rounded": (LigerFSDPStrategy, "bf16-mixed", NF4, "would round the bits"),
    "storage": (LigerFSDPStrategy, "32-true", NF4 | {"bnb_4bit_quant_storage": "uint8"}, "must be 'float32'"),
    "sharded": (lambda: LigerFSDPStrategy(state_dict_type="sharded"), "32-true", NF4, "state_dict_type must be 'full'"),
    "split": (lambda: LigerModelParallelStrategy(tensor_parallel_size=2), "32-true", NF4, "tensor_parallel_size"),
    "torchao": (LigerFSDPStrategy, "32-true", TORCHAO, "torchao with 'liger_model_parallel'"),
    "torchao split": (
        lambda: LigerModelParallelStrategy(tensor_parallel_size=2),
        "32-true",
        TORCHAO,
        "tensor_parallel_size",
    ),
}


class Module(LigerCausalLM):
    num_bytes = 0

    def configure_optimizers(self) -> Any:
        # With this eps a step does not follow the sign of gradients that are nearly 0.
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2, eps=1e-3)

    def configure_model(self) -> None:
        with torch.device("cpu"):  # GPUs draw other numbers
            super().configure_model()

    def _start_quantized(self) -> None:
        for weight in self.parameters():
            if hasattr(weight, "qdata"):
                weight.qdata.add_(self.global_rank)  # all ranks train over the weights of the first
        super()._start_quantized()

    def on_train_start(self) -> None:
        super().on_train_start()
        weights = [each for name, each in self.named_parameters() if "base_layer.weight" in name]
        local = [each.to_local() if isinstance(each, DTensor) else getattr(each, "qdata", each) for each in weights]
        self.num_bytes = sum(each.nbytes for each in local)


def make(folder: Path, quantization: dict[str, Any]) -> Module:
    return Module(folder / "model", lora=LORA, quantization=quantization)


def fit(
    folder: Path, run: str, strategy: Any, precision: str, device: str, rank: int, num_ranks: int,
    ckpt_path: Any = None, quantization: dict[str, Any] = NF4,
) -> tuple[Module, L.Trainer]:  # fmt: skip
    torch.manual_seed(rank)  # all ranks start with the adapters that the first draws
    module, saving = (
        make(folder, quantization),
        ModelCheckpoint(folder / run, "{step}", every_n_train_steps=1, save_top_k=-1),
    )
    batches = [tiny_batch(seed=number, num_ignored=number % 5) for number in range(8)]
    trainer = quiet_trainer(
        strategy=strategy, devices=num_ranks, precision=precision, max_steps=4, callbacks=[saving],
        enable_checkpointing=True, accumulate_grad_batches=2 // num_ranks, use_distributed_sampler=False,
        default_root_dir=folder, accelerator="cpu" if device == "cpu" else "gpu",
        num_sanity_val_steps=1, limit_val_batches=1, gradient_clip_val=10.0,
    )  # fmt: skip
    validation = DataLoader(batches[:1], batch_size=None)
    trainer.fit(module, DataLoader(batches[rank::num_ranks], batch_size=None), validation, ckpt_path=ckpt_path)
    return module, trainer


def adapters(path: Path) -> dict[str, torch.Tensor]:
    return _read(path, contents(path, True))


def metrics(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(trainer.callback_metrics[name]) for name in ("train_loss", "grad_norm", "val_loss")}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(device: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("bitsandbytes")
    path = tmp_path_factory.mktemp("quantized")
    tiny_llama(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(path / "model")
    return path


@pytest.fixture(scope="module")
def ranks(device: str, folder: Path) -> list[dict[str, Any]]:
    return launch(device, folder, worker=__name__, num_ranks=2)


@pytest.mark.parametrize("run", RUNS)
def test_two_ranks_train_as_one_process_resume_and_merge(device, folder, tmp_path, ranks, run):
    _, precision, quantization = RUNS[run]
    if quantization is TORCHAO:
        pytest.importorskip("torchao")
    alone = f"alone-{run}"
    module, trainer = fit(folder, alone, "liger", precision, device, 0, 1, quantization=quantization)
    whole, shard = (NUM_ELEMENTS,) * 2 if quantization is TORCHAO else (NUM_ELEMENTS / 2, NUM_ELEMENTS / 4)
    assert module.num_bytes == whole
    is_exact = precision == "32-true"
    expected = pytest.approx(metrics(trainer), rel=1e-4 if is_exact else 2e-2)
    for rank in ranks:
        assert rank[run]["metrics"] == expected
        assert rank[run]["num_bytes"] == pytest.approx(shard, rel=0.15)  # FSDP splits layers anywhere
    found, alone = (adapters(folder / name / "step=4.ckpt") for name in (run, alone))
    assert all("lora_" in name for name in found)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-5 if is_exact else 5e-3)
    start = adapters(folder / run / "step=1.ckpt")
    assert all((found[name] - start[name]).abs().max() > 1e-3 for name in found)
    if not is_exact:
        return
    tolerance = 0 if device == "cpu" else 1e-7
    torch.testing.assert_close(adapters(folder / f"{run}-resumed" / "step=4.ckpt"), found, rtol=0, atol=tolerance)

    export_pretrained(make(folder, quantization), folder / run / "step=4.ckpt", tmp_path / "merged")
    base, merged = (AutoModelForCausalLM.from_pretrained(each) for each in (folder / "model", tmp_path / "merged"))
    name = "model.layers.1.mlp.up_proj"
    a, b = (found[f"model.base_model.model.{name}.lora_{part}.default.weight"].cpu() for part in "AB")
    torch.testing.assert_close(merged.get_submodule(name).weight, base.get_submodule(name).weight + 2 * b @ a)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sharded_is_told(ranks, case):
    if REFUSED[case][2] is TORCHAO:
        pytest.importorskip("torchao")
    assert all(REFUSED[case][3] in rank["refused"][case] for rank in ranks), ranks[0]["refused"][case]


def test_checkpoint_of_other_adapters_is_refused(ranks):
    for rank in ranks:
        assert all("must hold the adapters" in message for message in rank["others"])


def errors(run: Callable[[], Any]) -> str:
    try:
        run()
    except ValueError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    torch.set_num_threads(1)
    device, out, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    results: dict[str, Any] = {"refused": {}}
    has_torchao = package_available("torchao")
    for run, (strategy, precision, quantization) in RUNS.items():
        if quantization is TORCHAO and not has_torchao:
            continue
        module, trainer = fit(out, run, strategy(), precision, device, rank, 2, quantization=quantization)
        results[run] = {"num_bytes": module.num_bytes, "metrics": metrics(trainer)}
        if precision == "32-true":
            path = out / run / "step=2.ckpt"
            fit(out, f"{run}-resumed", strategy(), precision, device, rank, 2, path, quantization)
    for case, (strategy, precision, quantization, _) in REFUSED.items():
        if quantization is TORCHAO and not has_torchao:
            continue
        results["refused"][case] = errors(
            lambda: fit(out, case, strategy(), precision, device, rank, 2, quantization=quantization)  # noqa: B023
        )
    LORA["target_modules"] = ["q_proj"]
    results["others"] = []
    for run in ("fsdp", "fsdp2", "fsdp2-file"):
        accelerator = "cpu" if device == "cpu" else "gpu"
        trainer = quiet_trainer(
            strategy=RUNS[run][0](), devices=2, use_distributed_sampler=False, accelerator=accelerator
        )
        arguments = make(out, NF4), DataLoader([tiny_batch()], batch_size=None), out / run / "step=2.ckpt"
        results["others"].append(errors(lambda: trainer.validate(*arguments)))  # noqa: B023
    torch.save(results, out / f"rank{rank}.pt")
