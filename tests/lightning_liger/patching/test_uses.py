"""Patched models in the ways that models are used: attention, packing, checkpointing, compiling, casting."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import LazyLogits, LigerLMMixin, apply_liger_kernels, lazy_logits
from tests.lightning_liger.patching.rules.comparing import assert_same_gradients
from tests.lightning_liger.tiny import VOCAB_SIZE, TensorSizes, tiny_batch, tiny_model

FAMILIES = ["qwen3", "gemma3_text", "phi3", "mixtral"]


def pair(model_type: str = "llama", attention: str = "eager", **overrides: Any) -> tuple[nn.Module, nn.Module]:
    """A model and its patched copy."""
    model = tiny_model(model_type, **overrides)
    model.set_attn_implementation(attention)
    patched = copy.deepcopy(model)
    apply_liger_kernels(patched)
    return model, patched


def assert_same(model: nn.Module, patched: nn.Module, batch: dict[str, Any]) -> None:
    losses = [each(**batch).loss for each in (model, patched)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    assert_same_gradients(model, patched)
    counters = patched.get_output_embeddings().fusion_counters
    assert (counters.num_losses, counters.num_materialized) == (1, 0)


def padded_batch() -> dict[str, Tensor]:
    batch = tiny_batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, -3:] = 0
    return batch


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_attention_gets_what_it_got_before(model_type: str, attention: str) -> None:
    assert_same(*pair(model_type, attention), padded_batch())


@torch.no_grad()
def test_flex_attention_gets_what_it_got_before() -> None:
    losses = [each(**padded_batch()).loss for each in pair("qwen3", "flex_attention")]  # no backward on CPUs
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


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


def test_compiled_model_computes_the_same() -> None:
    model, patched = (LossOutside(each) for each in pair("llama", "sdpa"))
    torch._dynamo.reset()
    compiled = torch.compile(patched, backend="aot_eager")
    losses = [model(**tiny_batch()), compiled(**tiny_batch())]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    assert_same_gradients(model, patched)


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
