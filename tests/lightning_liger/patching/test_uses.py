"""Patched models in the ways that models are used: packing, checkpointing, compiling, casting."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from lightning_liger import LazyLogits, LigerLMMixin, apply_liger_kernels, lazy_logits
from lightning_liger.patching.rules.base import Patched
from tests.lightning_liger.architectures import IMAGE_TEXT_TYPES, tiny_image_text_model
from tests.lightning_liger.patching.rules.comparing import assert_same_gradients
from tests.lightning_liger.tiny import VOCAB_SIZE, TensorSizes, tiny_batch, tiny_model


def pair(model_type: str = "llama", attention: str = "eager", **overrides: Any) -> tuple[nn.Module, nn.Module]:
    """A model and its patched copy."""
    model = tiny_model(model_type, **overrides)
    model.set_attn_implementation(attention)
    patched = copy.deepcopy(model)
    apply_liger_kernels(patched)
    return model, patched


def assert_same(model: nn.Module, patched: nn.Module, batch: dict[str, Any]) -> None:
    losses = [each(**batch).loss for each in (model, patched)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for loss in losses:
        loss.backward()
    assert_same_gradients(model, patched)
    counters = patched.get_output_embeddings().fusion_counters
    assert (counters.num_losses, counters.num_materialized) == (1, 0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_documents_keep_their_positions(attention: str) -> None:
    batch = tiny_batch(batch_size=1, seq_len=12)
    batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    model, patched = pair("llama", attention)
    assert_same(model, patched, batch)
    other = patched(**batch | {"position_ids": torch.arange(12)[None]}).loss
    assert not torch.isclose(other, model(**batch).loss, rtol=1e-4)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_of_hugging_face(use_reentrant: bool) -> None:
    model, patched = pair("qwen3")
    for each in (model, patched):
        each.train()
        each.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        each.enable_input_require_grads()
    assert_same(model, patched, tiny_batch())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_model_cast_after_patching_follows(dtype: torch.dtype) -> None:
    model, patched = (each.to(dtype) for each in pair("olmo2"))
    losses = [each(**tiny_batch()).loss for each in (model, patched)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)


def test_tuple_outputs_and_logits_of_the_last_tokens_only() -> None:
    model, patched = pair()
    batch = tiny_batch()
    loss, logits, *_ = model(**batch, return_dict=False)
    fused_loss, fused_logits, *_ = patched(**batch, return_dict=False)
    torch.testing.assert_close(fused_loss, loss)
    torch.testing.assert_close(fused_logits[:, -1].materialize(), logits[:, -1])
    for keep in (3, torch.tensor([1, 4])):
        kept = [each(input_ids=batch["input_ids"], logits_to_keep=keep).logits for each in (model, patched)]
        assert kept[1].shape == kept[0].shape
        torch.testing.assert_close(kept[1] + 0.0, kept[0])


class LossOutside(nn.Module):
    """Computes its loss as people do around a model that they did not write."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


class Mixin(LigerLMMixin, nn.Module):
    """The mixin's loss without the rest of a LightningModule."""


LOSSES: dict[str, Callable[[Any, dict[str, Tensor]], Tensor]] = {
    "of_the_model": lambda model, batch: model(**batch).loss,
    "of_items": lambda model, batch: model(**batch, num_items_in_batch=torch.tensor(40)).loss,
    "of_the_mixin": lambda model, batch: Mixin().lm_loss(model(batch["input_ids"]).logits, batch["labels"]),
    "outside": lambda model, batch: LossOutside(model)(**batch),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_loss_is_the_same_without_a_tensor_of_the_logits_size(
    loss: Callable[[Any, dict[str, Tensor]], Tensor], training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, patched = pair(tie_word_embeddings=training)
    # Enough tokens for the logits to outgrow every weight, and rows short enough for attention not to.
    batch = tiny_batch(batch_size=8, seq_len=16, num_ignored=16)
    with torch.set_grad_enabled(training), lazy_logits():
        want = loss(model, batch)
        with TensorSizes(monkeypatch) as sizes:
            got = loss(patched, batch)
            if training:
                got.backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    num_kept_tokens = 7 * 15
    logits_size = batch["labels"].numel() * VOCAB_SIZE
    assert num_kept_tokens // 2 * VOCAB_SIZE <= sizes.largest_in_loss <= sizes.largest < logits_size
    if training:
        want.backward()
        assert_same_gradients(model, patched)


def test_generate_gives_the_tokens_of_the_unpatched_model() -> None:
    model, patched = (each.eval() for each in pair())
    prompt = tiny_batch()["input_ids"]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    want = model.generate(prompt, **options)
    assert want.shape[1] > prompt.shape[1]
    assert torch.equal(patched.generate(prompt, **options), want)
    with lazy_logits():  # as a callback may have it around a validation step
        assert torch.equal(patched.generate(prompt, **options), want)


@torch.no_grad()
def test_failed_forward_with_labels_leaves_no_wish_for_a_loss_behind() -> None:
    _, patched = pair()
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        patched(labels=tiny_batch()["labels"])
    assert not isinstance(patched(tiny_batch()["input_ids"]).logits, LazyLogits)


@pytest.mark.parametrize("model_type", IMAGE_TEXT_TYPES)
def test_text_loss_is_fused_and_the_same(model_type: str) -> None:
    if model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        pytest.skip("this version of transformers does not have it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny_image_text_model(model_type)
    if model_type == "llama4" and Version(transformers.__version__).release[:2] == (5, 24):
        pytest.skip("the stock model of this version reads no text without images")
    patched = copy.deepcopy(model)
    report = apply_liger_kernels(patched)
    assert report.num_replaced > 1
    input_ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(0))
    labels = input_ids.masked_fill(torch.arange(13) < torch.tensor([[3], [0]]), -100)
    assert_same(model, patched, {"input_ids": input_ids, "labels": labels})


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.b(x) * F.silu(self.a(x)))


class PlainLM(nn.Module):
    """Written as people write their own: the head is found by its size."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(67, 16), nn.Embedding(32, 16)
        blocks = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.RMSNorm(16, 1e-5), SwiGLU()) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(16, 67, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = x + block(x).cumsum(1)
        logits = self.head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_plain_model_gets_every_kernel_that_fits_and_computes_the_same(tied: bool) -> None:
    torch.manual_seed(0)
    model = PlainLM(tied)
    patched = copy.deepcopy(model)
    report = apply_liger_kernels(patched)
    replaced = {entry.kernel: entry.count for entry in report.entries if entry.replacement is not None}
    assert replaced == {"layer_norm": 2, "rms_norm": 2, "silu_mul": 2, "linear_cross_entropy": 1}
    tokens, targets = torch.randint(67, (2, 2, 9))
    targets[0, :4] = -1
    losses = [each(tokens, targets)[1] for each in (model, patched)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    assert_same_gradients(model, patched)
    assert patched.head.fusion_counters.num_losses == 1
    with torch.no_grad():
        torch.testing.assert_close(patched(tokens)[0], model(tokens)[0])
    report.undo()
    assert not any(isinstance(module, Patched) for module in patched.modules())


def test_head_that_is_not_the_only_one_of_its_size_stays() -> None:
    model = PlainLM(tied=False)
    model.second_head = nn.Linear(16, 67)
    report = apply_liger_kernels(model)
    assert "linear_cross_entropy" not in {entry.kernel for entry in report.entries}
    assert type(model.head) is nn.Linear


def _loss_and_gradients(model: LlamaForCausalLM, labels: Tensor) -> dict[str, Tensor]:
    input_ids = labels.clamp(min=0)
    loss = model(input_ids=input_ids, labels=labels).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_patched_llama_in_bfloat16_is_no_further_from_float64_than_unpatched(tied: bool) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 1031, "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=3, num_key_value_heads=2, tie_word_embeddings=tied)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    labels = torch.randint(0, config.vocab_size, (4, 257), device="cuda")
    labels[:, :60] = -100
    truth_model = copy.deepcopy(model).double()
    patched = copy.deepcopy(model)
    report = apply_liger_kernels(patched)
    assert report.num_replaced == 3 + 3 + 7 + 1

    truth = _loss_and_gradients(truth_model, labels)
    eager = _loss_and_gradients(model, labels)
    fused = _loss_and_gradients(patched, labels)
    total = {"eager": 0.0, "fused": 0.0}
    for name, want in truth.items():
        scale = want.norm().item()
        error = {"eager": (eager[name].double() - want).norm().item() / scale}
        error["fused"] = (fused[name].double() - want).norm().item() / scale
        # One tensor's rounding is a matter of luck: a little slack for each, none for all of them together.
        assert error["fused"] <= 1.5 * error["eager"] + torch.finfo(torch.bfloat16).eps / 4, (name, error)
        for kind in total:
            total[kind] += error[kind] if name != "loss" else 0.0
    assert total["fused"] <= total["eager"], total
