"""Medusa heads: losses and gradients against a loop over whole logits, and training of heads alone and together."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import LigerMedusa, LigerMedusaMixin, MedusaHeads, apply_liger_kernels
from lightning_liger.post_training.medusa_heads import load_medusa_heads, save_medusa_heads
from tests.lightning_liger.patching.rules.comparing import assert_same_gradients
from tests.lightning_liger.post_training.training import Recorded, assert_same_parameters, fit, loader
from tests.lightning_liger.tiny import (
    TINY_CONFIG,
    VOCAB_SIZE,
    TensorSizes,
    quiet_trainer,
    tiny_batch,
    tiny_llama,
    tiny_model,
)

HEADS = 3


class Medusa(LigerMedusaMixin, Recorded):
    learning_rate = 0.5

    def __init__(self, model: nn.Module, shared: bool = False, num_layers: int = 1, **settings: Any) -> None:
        super().__init__(**{f"medusa_{name}": value for name, value in settings.items()})
        self.model = model
        self.medusa_heads = MedusaHeads.of(model, HEADS, num_layers, shared_head=shared)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for parameter in self.medusa_heads.parameters():
                parameter.data += 0.05 * torch.randn_like(parameter)
        model.requires_grad_(not self.medusa_only_heads)


def whole_loss(
    model: Any, heads: MedusaHeads, batch: dict[str, Tensor], coefficient: float | None, decay: float = 0.8
) -> Tensor:
    """The formula on whole logits: head k predicts the token k + 2 later; ``coefficient`` None for the heads alone."""
    hidden = model.model(batch["input_ids"]).last_hidden_state
    head, labels = model.get_output_embeddings(), batch["labels"]
    cap = getattr(model.config, "final_logit_softcapping", None)

    def cross_entropy(logits: Tensor, shift: int) -> Tensor:
        logits = cap * torch.tanh(logits / cap) if cap else logits
        return F.cross_entropy(logits[:, :-shift].flatten(0, 1), labels[:, shift:].flatten(), reduction="sum")

    total = torch.zeros(())
    for k, each in enumerate(heads):
        states = hidden
        for layer in each:
            states = F.silu(layer.linear(states)) + states if hasattr(layer, "linear") else layer(states)
        logits = head(states) if heads.is_shared else states
        total = total + decay ** (k + 1) * cross_entropy(logits, k + 2)
    if coefficient is not None:
        total = coefficient * total + cross_entropy(head(hidden), 1)
    return total / (labels[:, 1:] >= 0).sum()


@pytest.mark.parametrize("shared", [False, True], ids=["own_heads", "shared_head"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_gradients_are_those_of_whole_logits(
    stage: int, shared: bool, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 2 has tied embeddings and a soft-cap, which further heads have as well."""
    model = tiny_model(model_type, tie_word_embeddings=model_type == "gemma2")
    module, batch = Medusa(model, shared, only_heads=stage == 1), tiny_batch(8, 24)
    twin = copy.deepcopy(module)
    expected_loss = whole_loss(twin.model, twin.medusa_heads, batch, None if stage == 1 else 0.2)
    expected_loss.backward()
    apply_liger_kernels(module, {"linear_cross_entropy": {"chunk_bytes": 32 * VOCAB_SIZE * 4}})

    with TensorSizes(monkeypatch) as sizes:
        loss = module.training_step(batch, 0)
        loss.backward()

    assert sizes.largest < 8 * 24 * VOCAB_SIZE
    torch.testing.assert_close(loss, expected_loss.detach(), check_dtype=False)
    assert_same_gradients(twin, module)
    found = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    blocks = [name for name in found if ".linear." in name]
    assert len(blocks) == 2 * HEADS  # liger-kernel's example leaves them out
    assert all(found[name].abs().max() > 0 for name in blocks)
    assert any(name.startswith("model.") for name in found) == (stage == 2)


def test_only_heads_leaves_the_model_bitwise_unchanged() -> None:
    model = tiny_llama(attention_dropout=0.5)
    module = Medusa(model)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    fit(module, [tiny_batch()] * 3)
    after = module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("model."))
    heads = [name for name in before if name.startswith("medusa_heads.")]
    assert heads
    assert not any(torch.equal(after[name], before[name]) for name in heads)
    assert not model.training
    assert module.medusa_heads.training


def test_joint_training_equals_a_loop_over_whole_logits() -> None:
    """Two steps of two micro-batches of different lengths, with the heads' weight rising."""
    batches = [tiny_batch(2, length, seed=length) for length in (9, 5, 12, 7)]
    module = Medusa(tiny_llama(), only_heads=False, scheduler="linear", scheduler_steps=4)
    twin = Medusa(tiny_llama(), only_heads=False)
    optimizer = twin.configure_optimizers()
    for step in range(2):
        window = batches[2 * step : 2 * step + 2]
        counts = [(batch["labels"][:, 1:] >= 0).sum() for batch in window]
        loss = torch.zeros(())
        for batch, count in zip(window, counts, strict=True):
            loss = loss + whole_loss(twin.model, twin.medusa_heads, batch, 0.2 * step / 4) * count / sum(counts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    fit(module, batches, accumulate_grad_batches=2)
    assert_same_parameters(module, twin, rtol=1e-3, atol=1e-5)


def test_packed_documents_do_not_predict_each_other() -> None:
    lengths = (5, 2, 4)
    rows = [tiny_batch(1, length, 0, seed=length)["input_ids"] for length in lengths]
    packed = torch.cat(rows, dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    module = Medusa(tiny_llama())
    apply_liger_kernels(module, "linear_cross_entropy")
    whole = module.step_loss("val", {"input_ids": packed, "labels": packed, "position_ids": positions})
    parts = [module.step_loss("val", {"input_ids": row, "labels": row}) for row in rows]
    torch.testing.assert_close(whole.terms[0].total, sum(part.terms[0].total for part in parts), rtol=1e-4, atol=1e-4)
    for k in range(HEADS):
        name = f"medusa{k}_loss"
        assert whole.metrics[name][1] == sum(max(0, length - k - 2) for length in lengths)


def test_heads_start_as_the_lm_head_and_are_saved_under_medusas_names(tmp_path: Path) -> None:
    model = tiny_llama()
    heads = MedusaHeads.of(model, 2, 2)
    states = torch.randn(3, 32)
    torch.testing.assert_close(heads(states), [model.lm_head(states)] * 2)
    assert heads[0][-1].weight is not model.lm_head.weight
    expected = {f"{k}.{i}.linear.{name}" for k in range(2) for i in range(2) for name in ("weight", "bias")}
    assert set(heads.state_dict()) == expected | {"0.2.weight", "1.2.weight"}

    nn.init.normal_(heads[1][0].linear.weight)
    save_medusa_heads(heads, tmp_path / "heads", base_model="tiny")
    assert '"medusa_num_heads": 2' in (tmp_path / "heads" / "config.json").read_text()
    other = MedusaHeads.of(tiny_llama(), 2, 2)
    load_medusa_heads(other, tmp_path / "heads")
    torch.testing.assert_close(other(states), heads(states))


@pytest.mark.parametrize("source", ["adapters", "copy"])
def test_self_distillation_is_toward_the_original_model(source: str) -> None:
    original, batch = tiny_llama(), tiny_batch()
    with torch.no_grad():
        p = original(batch["input_ids"]).logits[:, :-1].log_softmax(-1)

    class Distilled(Medusa):
        def configure_original_model(self) -> nn.Module:
            return original

    module = Distilled(tiny_llama(), only_heads=False, self_distillation=True)
    if source == "adapters":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        module.model = peft.get_peft_model(module.model, config)
    else:
        module.model.model.norm.weight.data *= 1.5
    q = module.model(batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    kept = batch["labels"][:, 1:] >= 0
    expected = (p.exp() * (p - q)).sum(-1)[kept].sum()
    apply_liger_kernels(module, "linear_cross_entropy")
    result = module.step_loss("train", batch)
    torch.testing.assert_close(result.metrics["lm_divergence"][0], expected.detach(), rtol=1e-3, atol=1e-4)
    result.terms[0].total.backward()
    trained = {name for name, each in module.named_parameters() if each.grad is not None}
    assert all("lora_" in name or name.startswith("medusa_heads") for name in trained) == (source == "adapters")
    assert "lm_loss" not in module.metric_kinds()


@pytest.mark.parametrize("only_heads", [True, False], ids=["heads", "joint"])
def test_finished_module_trains_heads_at_their_own_rate(only_heads: bool, tmp_path: Path) -> None:
    settings = {"config": TINY_CONFIG, "learning_rate": 0.01, "warmup_steps": 1, "min_lr_ratio": 1.0}
    module = LigerMedusa(
        medusa_num_heads=2, medusa_only_heads=only_heads, medusa_lr_multiplier=4.0, medusa_warmup_steps=3, **settings
    )
    trainer = fit(module, [tiny_batch()] * 2)
    groups = trainer.optimizers[0].param_groups
    head_ids = {id(each) for each in module.medusa_heads.parameters()}
    rates = {group["initial_lr"]: {id(each) in head_ids for each in group["params"]} for group in groups}
    assert rates == ({0.04: {True}} if only_heads else {0.04: {True}, 0.01: {False}})
    assert {group["initial_lr"]: group["lr"] for group in groups}[0.04] == pytest.approx(0.04 * 3 / 4)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert LigerMedusa.load_from_checkpoint(tmp_path / "a.ckpt").hparams.medusa_num_heads == 2


def test_heads_weight_without_training_is_that_after_the_schedule() -> None:
    losses = []
    for scheduler in ("constant", "linear"):
        module = Medusa(tiny_llama(), only_heads=False, scheduler=scheduler)
        losses += quiet_trainer(strategy="liger").validate(module, loader([tiny_batch()]), verbose=False)
    assert losses[0] == losses[1]


def test_heads_of_models_on_the_meta_device_start_as_the_lm_head(tmp_path: Path) -> None:
    for tied in (False, True):
        folder = tmp_path / str(tied)
        original = tiny_llama(tie_word_embeddings=tied)
        original.save_pretrained(folder)
        module = LigerMedusa(pretrained=str(folder), medusa_num_heads=2, learning_rate=0.0)
        trainer = fit(module, [tiny_batch()], strategy="liger_model_parallel")
        assert trainer.global_step == 1
        state = {name: tensor.full_tensor() for name, tensor in module.medusa_heads.state_dict().items()}
        for name, tensor in state.items():
            expected = original.lm_head.weight if name.endswith("1.weight") else torch.zeros_like(tensor)
            torch.testing.assert_close(tensor, expected.detach(), rtol=0.0, atol=0.0)


def test_compiled_module_trains_as_others() -> None:
    modules = [Medusa(tiny_llama()) for _ in range(2)]
    for module in (modules[0], torch.compile(modules[1], backend="eager")):
        fit(module, [tiny_batch()])  # type: ignore[arg-type]
    assert_same_parameters(*modules)
