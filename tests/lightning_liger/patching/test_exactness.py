"""Patched against unpatched models: the same loss and gradients, and no tensor of the logits' size."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import LigerLMMixin, apply_liger_kernels
from lightning_liger.lazy.logits import lazy_logits
from tests.lightning_liger.tiny import VOCAB_SIZE, TensorSizes, tiny_batch, tiny_llama

Batch = dict[str, Tensor]


class Mixin(LigerLMMixin, nn.Module):
    """The mixin's loss without the rest of a LightningModule."""


def loss_of_the_model(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def loss_of_shifted_logits(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits[..., :-1, :].reshape(-1, logits.shape[-1]).float(), batch["labels"][:, 1:].flatten())


def loss_of_the_mixin(model: nn.Module, batch: Batch) -> Tensor:
    return Mixin().lm_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"])


def loss_over_items_in_batch(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, num_items_in_batch=torch.tensor(40)).loss


LOSSES = [loss_of_the_model, loss_of_shifted_logits, loss_of_the_mixin, loss_over_items_in_batch]


def assert_same_loss_and_gradients(
    model: nn.Module, patched: nn.Module, batch: Batch, loss_function: Callable[..., Tensor] = loss_of_the_model
) -> None:
    losses = [loss_function(each, batch) for each in (model, patched)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    for loss in losses:
        (loss * 0.7).backward()
    for (name, want), got in zip(model.named_parameters(), patched.parameters(), strict=True):
        assert want.grad.abs().max() > 0, name
        # Sums over tokens in another order: an error relative to the largest element of a gradient, not to each.
        scale = want.grad.abs().max().item()
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


def counters(model: nn.Module) -> Any:
    return model.get_output_embeddings().fusion_counters


@pytest.mark.parametrize("loss_function", LOSSES, ids=lambda function: function.__name__)
@pytest.mark.parametrize(("tied", "num_ignored"), [(False, 0), (True, 4), (False, 11)])
def test_patched_llama_has_the_loss_and_gradients_of_the_unpatched(
    tied: bool, num_ignored: int, loss_function: Callable[..., Tensor]
) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    patched = copy.deepcopy(model)
    assert apply_liger_kernels(patched).num_replaced == 2 + 2 + 5 + 1
    assert_same_loss_and_gradients(model, patched, tiny_batch(num_ignored=num_ignored), loss_function)
    assert (counters(patched).num_losses, counters(patched).num_materialized) == (1, 0)


def test_failed_forward_with_labels_leaves_no_wish_for_a_loss_behind() -> None:
    patched = tiny_llama()
    apply_liger_kernels(patched)
    batch = tiny_batch()
    with torch.no_grad():
        with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
            patched(labels=batch["labels"])
        assert isinstance(patched(input_ids=batch["input_ids"]).logits, Tensor)


@pytest.mark.parametrize("kernels", ["auto", "none"])
@pytest.mark.parametrize("loss_function", LOSSES, ids=lambda function: function.__name__)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_no_tensor_of_the_logits_size_is_made_by_a_patched_model(
    kernels: str, loss_function: Callable[..., Tensor], training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    apply_liger_kernels(model, kernels)
    # Enough tokens for the logits to outgrow every weight, and rows short enough for attention not to.
    batch = tiny_batch(batch_size=8, seq_len=16, num_ignored=3)
    logits_size = batch["labels"].numel() * VOCAB_SIZE
    assert logits_size > max(parameter.numel() for parameter in model.parameters())
    sizes = TensorSizes(monkeypatch)
    with sizes, torch.set_grad_enabled(training), lazy_logits():
        loss = loss_function(model, batch)
        if training:
            loss.backward()
    if kernels == "none":
        assert sizes.largest >= logits_size
    else:
        num_kept_tokens = 8 * 15
        assert num_kept_tokens // 2 * VOCAB_SIZE <= sizes.largest_in_loss <= sizes.largest < logits_size


def test_generate_gives_the_tokens_of_the_unpatched_model() -> None:
    model = tiny_llama().eval()
    patched = copy.deepcopy(model)
    apply_liger_kernels(patched)
    prompt = tiny_batch(num_ignored=0)["input_ids"]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    want = model.generate(prompt, **options)
    assert want.shape[1] > prompt.shape[1]
    assert torch.equal(patched.generate(prompt, **options), want)
    with lazy_logits():  # as a callback may have it around a validation step
        assert torch.equal(patched.generate(prompt, **options), want)


def test_autocast_decides_on_the_dtypes_of_the_unpatched_model() -> None:
    model = tiny_llama()
    patched = copy.deepcopy(model)
    apply_liger_kernels(patched)
    batch = tiny_batch()
    with torch.autocast("cpu", torch.bfloat16):
        want, got = model(**batch), patched(**batch)
    assert got.logits.dtype == want.logits.dtype == torch.bfloat16
    assert got.loss.dtype == want.loss.dtype == torch.float32
    torch.testing.assert_close(got.loss, want.loss, rtol=torch.finfo(torch.bfloat16).eps, atol=0)
    got.loss.backward()
    assert {parameter.grad.dtype for parameter in patched.parameters()} == {torch.float32}
