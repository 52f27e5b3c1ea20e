"""Adapters of models whose frozen weights are quantized: the losses of stock transformers and peft, and checkpoints."""

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_liger import LigerCausalLM, LigerDPO, export_pretrained
from lightning_liger.data import PreferenceDataModule
from lightning_liger.training import lora
from lightning_liger.training.lora import check_quantization, fit_to_strategy
from tests.lightning_liger.strategies.workers.distributed import logit_counts
from tests.lightning_liger.tiny import quiet_trainer, tiny_batch, tiny_llama

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"},
}
LORA = {"r": 4, "alpha": 8, "target_modules": "all-linear"}
BATCHES = [tiny_batch(seed=seed) for seed in range(4)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pretrained")
    tiny_llama(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(path)
    return path


@pytest.fixture(params=KINDS)
def quantization(request) -> dict[str, Any]:
    pytest.importorskip("torchao" if request.param == "int8" else "bitsandbytes")
    return KINDS[request.param]


class Losses(LigerCausalLM):
    """Keeps the adapters' first values and the loss of each step."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self.start = {name: p.detach().cpu().clone() for name, p in self.model.named_parameters() if p.requires_grad}
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss


def make(folder: Path, quantization: dict[str, Any], kind: type[LigerCausalLM] = LigerCausalLM) -> Any:
    options = {"learning_rate": 1e-2, "weight_decay": 0.0, "min_lr_ratio": 1.0}
    return kind(folder, lora=LORA, quantization=quantization, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_learn_as_with_stock_transformers_and_peft(folder, tmp_path, quantization, device):
    module = make(folder, quantization, Losses)
    accelerator = "cpu" if device == "cpu" else "gpu"
    trainer = quiet_trainer(strategy="liger", accelerator=accelerator, max_steps=4, default_root_dir=tmp_path)
    trainer.fit(module, DataLoader(BATCHES, batch_size=None))
    assert {entry.kernel for entry in trainer.strategy.patch_report.entries if entry.replacement} >= {
        "rms_norm", "rope", "linear_cross_entropy",
    }  # fmt: skip
    assert logit_counts(module)[1] == 0
    head, embedding = module.model.get_output_embeddings(), module.model.get_input_embeddings()
    assert head.weight.dtype == embedding.weight.dtype == torch.float32
    assert all(set(name.split(".")) & {"lora_A", "lora_B"} for name in module.start)

    config = check_quantization(quantization, LORA, folder)
    stock = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": device})
    stock = get_peft_model(
        stock, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    ).train()
    parameters = {name: each for name, each in stock.named_parameters() if each.requires_grad}
    assert parameters.keys() == module.start.keys()
    with torch.no_grad():
        for name, each in parameters.items():
            each.copy_(module.start[name])
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for batch in BATCHES:
        loss = stock(**{name: each.to(device) for name, each in batch.items()}).loss
        losses.append(float(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)
    assert module.losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_weights_are_quantized_as_by_stock_transformers(folder, tmp_path, device):
    """Lightning's default dtype of bf16-true reaches no table of bitsandbytes, which its kernels read as float32."""
    pytest.importorskip("bitsandbytes")
    module, accelerator = make(folder, KINDS["nf4"]), "cpu" if device == "cpu" else "gpu"
    trainer = quiet_trainer(
        strategy="liger", accelerator=accelerator, precision="bf16-true", max_steps=1, default_root_dir=tmp_path
    )
    trainer.validate(module, DataLoader(BATCHES, batch_size=None))
    config = check_quantization(KINDS["nf4"], LORA, folder)
    stock = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map={"": device}, dtype=torch.bfloat16
    )
    weights = {name: weight for name, weight in stock.named_parameters() if hasattr(weight, "quant_state")}
    assert len(weights) == 14
    model = module.model.get_base_model().to(device)
    for name, weight in weights.items():
        layer, _, kind = name.rpartition(".")
        found = model.get_parameter(f"{layer}.base_layer.{kind}")
        assert torch.equal(found, weight)
        assert found.quant_state.dtype == torch.bfloat16
        torch.testing.assert_close(found.quant_state.code, weight.quant_state.code, rtol=0, atol=0)
    token = torch.tensor([[7]], device=device)
    with torch.no_grad():  # one token is multiplied by a kernel that reads the table
        torch.testing.assert_close(model(token).logits + 0, stock(token).logits, rtol=2e-2, atol=2e-2)


def test_checkpoints_hold_the_adapters_resume_and_merge(folder, tmp_path, quantization):
    def fit(run: str, ckpt_path: Path | None = None) -> dict[str, torch.Tensor]:
        saving = ModelCheckpoint(tmp_path / run, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = quiet_trainer(strategy="liger", max_steps=4, callbacks=[saving], enable_checkpointing=True)
        trainer.fit(make(folder, quantization), DataLoader(BATCHES, batch_size=None), ckpt_path=ckpt_path)
        return torch.load(tmp_path / run / "step=4.ckpt", weights_only=True)["state_dict"]

    whole, half = fit("straight"), tmp_path / "straight" / "step=2.ckpt"
    assert whole
    assert all("lora_" in name for name in whole)
    torch.testing.assert_close(fit("resumed", half), whole)

    export_pretrained(make(folder, quantization), tmp_path / "straight" / "step=4.ckpt", tmp_path / "merged")
    base, merged = (AutoModelForCausalLM.from_pretrained(each) for each in (folder, tmp_path / "merged"))
    name = "model.layers.0.mlp.up_proj"
    a, b = (whole[f"model.base_model.model.{name}.lora_{part}.default.weight"] for part in "AB")
    torch.testing.assert_close(merged.get_submodule(name).weight, base.get_submodule(name).weight + 2 * b @ a)
    torch.testing.assert_close(merged.lm_head.weight, base.lm_head.weight)

    whole.popitem()
    broken = torch.load(half, weights_only=True) | {"state_dict": whole}
    torch.save(broken, tmp_path / "broken.ckpt")
    with pytest.raises(ValueError, match=r"must hold the adapters.*lora_"):
        fit("broken", tmp_path / "broken.ckpt")


def test_preferences_of_a_quantized_model_start_at_its_own_scores(folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    examples = Path(__file__).parents[3] / "examples" / "data"
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    tiny_llama(max_position_embeddings=256, **sizes).save_pretrained(tmp_path / "m")
    module = LigerDPO(pretrained=tmp_path / "m", lora=LORA, quantization=KINDS["nf4"], learning_rate=1e-2)
    data = PreferenceDataModule(
        path=examples / "preference.jsonl", tokenizer=examples / "tokenizer", batch_size=4, cache_dir=tmp_path / "cache"
    )
    trainer = quiet_trainer(strategy="liger", max_steps=4, default_root_dir=tmp_path)
    losses = []
    trainer.callbacks.append(LambdaCallback(on_train_batch_end=lambda *a: losses.append(float(a[2]["loss"]))))
    trainer.fit(module, data)
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5)  # adapters start at 0
    assert losses[-1] < losses[0]


def test_int4_of_torchao_is_refused(folder, monkeypatch):
    torchao, quantization = ModuleType("torchao"), ModuleType("torchao.quantization")
    torchao.quantization = quantization
    quantization.Int4WeightOnlyConfig = SimpleNamespace
    for module in (torchao, quantization):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(lora, "package_available", bool)
    settings = {"quant_method": "torchao", "quant_type": "Int4WeightOnlyConfig"}
    with pytest.raises(ValueError, match=r"quant_type'\] must be .*load_in_4bit, got 'Int4WeightOnlyConfig'"):
        LigerCausalLM(folder, lora=LORA, quantization=settings)


def test_what_cannot_be_quantized_is_told(folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    nf4 = KINDS["nf4"]
    for arguments, parts in (
        ({"quantization": nf4}, ("quantization", "without lora")),
        ({"quantization": nf4, "lora": LORA, "pretrained": None}, ("quantization", "pretrained")),
        ({"quantization": {"load_in_4bit": True, "load_in_8bit": True}, "lora": LORA}, ("either", "load_in_8bit")),
        ({"quantization": nf4 | {"bnb_4bit_quant_typ": "nf4"}, "lora": LORA}, ("did you mean 'bnb_4bit_quant_type'",)),
        ({"quantization": {"quant_method": "gptq"}, "lora": LORA}, ("'gptq'", "'torchao'")),
    ):
        with pytest.raises(ValueError) as raised:  # noqa: PT011  # the parts of its message follow
            LigerCausalLM(**{"pretrained": folder, **arguments})
        assert all(part in str(raised.value) for part in parts), raised.value
    with pytest.raises(TypeError, match="quantization"):
        LigerCausalLM(folder, lora=LORA, quantization=4)
    with pytest.raises(ValueError, match=r"quantization must be None under FSDPStrategy, or.*'liger_fsdp'"):
        fit_to_strategy(nf4, FSDPStrategy(), shards_packed=False)
    with pytest.raises(ValueError, match=r"bnb_4bit_quant_storage'\] must be 'float32', .*, or an integer one"):
        fit_to_strategy(nf4 | {"bnb_4bit_quant_storage": torch.bfloat16}, None, shards_packed=False)
    with pytest.raises(ValueError, match=r"None under FSDPStrategy.*torchao with 'liger_model_parallel'"):
        fit_to_strategy(KINDS["int8"], FSDPStrategy(), shards_packed=True)
