"""The mean over tokens does not depend on how a batch was split; two processes are in strategies/."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, LigerCausalLM
from tests.lightning_liger.tiny import tiny_batch, tiny_llama
from tests.lightning_liger.training.logging_lm import LoggingLM as LM

NUM_STEPS = 3


class LMOfMicroBatches(LM):
    loss_normalization = "micro_batch"


def micro_batches(seed: int) -> list[dict[str, Tensor]]:
    """Three of one optimizer step: of unequal sizes, with unequal numbers of labels, one without any."""
    sizes = [(2, 11, 4), (1, 7, 1), (1, 9, 9)]
    return [tiny_batch(*size, seed=10 * seed + index) for index, size in enumerate(sizes)]


def fit(module: L.LightningModule, batches: list[dict[str, Tensor]], **options: Any) -> None:
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[LigerCallback()], **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))


def by_hand(of_tokens: bool) -> tuple[nn.Module, list[float]]:
    """The unpatched model on whole steps, in a plain loop."""
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        parts = [(model(**batch).loss, (batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches(step)]
        counted = [(loss, count) for loss, count in parts if count > 0]
        if of_tokens:
            loss = sum(loss * count for loss, count in counted) / sum(count for _, count in counted)
        else:
            loss = sum(loss for loss, _ in counted) / len(parts)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def assert_same_parameters(module: nn.Module, model: nn.Module) -> None:
    for (name, got), want in zip(module.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_accumulated_micro_batches_train_as_one_batch_and_log_its_loss() -> None:
    module = LM()
    fit(module, [batch for step in range(NUM_STEPS) for batch in micro_batches(step)], accumulate_grad_batches=3)
    model, losses = by_hand(of_tokens=True)
    assert_same_parameters(module, model)
    assert module.logged[2::3] == pytest.approx(losses, rel=1e-5)


def test_mean_of_means_is_another_and_can_be_had() -> None:
    module = LMOfMicroBatches()
    steps = [batch for step in range(NUM_STEPS) for batch in micro_batches(step)]
    fit(module, steps, accumulate_grad_batches=3)
    model, _ = by_hand(of_tokens=False)
    assert_same_parameters(module, model)
    with pytest.raises(AssertionError):
        assert_same_parameters(module, by_hand(of_tokens=True)[0])


def test_window_that_the_epoch_cuts_short_is_the_mean_of_its_own_tokens() -> None:
    module = LM()
    fit(module, micro_batches(0)[:2], accumulate_grad_batches=5)
    model = tiny_llama()
    parts = [(model(**batch).loss, (batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches(0)[:2]]
    (sum(loss * count for loss, count in parts) / sum(count for _, count in parts)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_same_parameters(module, model)


def test_clipping_sees_the_gradients_of_the_mean() -> None:
    norms: list[float] = []

    class Clipped(LM):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    fit(Clipped(), micro_batches(0), accumulate_grad_batches=3, gradient_clip_val=1.0)
    model = tiny_llama()
    parts = [(model(**batch).loss, (batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches(0)[:2]]
    (sum(loss * count for loss, count in parts) / sum(count for _, count in parts)).backward()
    want = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert norms == pytest.approx([want], rel=1e-5)


def test_step_without_any_label_moves_nothing_but_by_weight_decay() -> None:
    class WithoutDecay(LM):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.0)

    module = WithoutDecay()
    fit(module, [tiny_batch(1, 9, num_ignored=9)])
    assert_same_parameters(module, tiny_llama())
    assert module.logged == [0.0]


def test_unknown_normalization_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss_normalization must be one of 'tokens', 'micro_batch', got 'mean'"):
        LigerCausalLM(config={"hidden_size": 32}, loss_normalization="mean")
