"""Dynamic fine-tuning in the steps of ``LigerLMMixin``, against whole logits of a stock model."""

import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCausalLM, LigerLMMixin
from lightning_liger.losses.sft import dft_loss
from tests.lightning_liger.tiny import tiny_batch, tiny_llama

Batch = dict[str, Tensor]


class LM(LigerLMMixin, L.LightningModule):
    loss_type = "dft"

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = tiny_llama()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def stock_log_probs(model: torch.nn.Module, batches: list[Batch]) -> Tensor:
    found = []
    for batch in batches:
        targets = batch["labels"][:, 1:].flatten()
        log_p = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1).double().log_softmax(-1)
        kept = targets != -100
        found.append(log_p[kept].gather(1, targets[kept][:, None])[:, 0])
    return torch.cat(found)


def test_gradient_of_dft_is_that_of_cross_entropy_times_the_probability() -> None:
    log_probs = torch.tensor([-0.1, -3.0, 0.0, -200.0], dtype=torch.float64, requires_grad=True)
    loss = dft_loss(log_probs)
    torch.testing.assert_close(loss, -log_probs.exp() * log_probs)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    torch.testing.assert_close(gradient, -log_probs.exp())


@pytest.mark.parametrize("strategy", ["liger", "auto"])
def test_dft_trains_like_a_loop_on_a_stock_model(strategy: str) -> None:
    batches = [tiny_batch(2, 11, num_ignored=4, seed=1), tiny_batch(1, 7, num_ignored=3, seed=2)]
    stock = tiny_llama()
    log_probs = stock_log_probs(stock, batches)
    loss = -(log_probs.detach().exp() * log_probs).mean()
    loss.backward()
    torch.optim.SGD(stock.parameters(), lr=0.5).step()

    module = LM()
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2,
    )  # fmt: skip
    data: Any = DataLoader(batches, batch_size=None, shuffle=False)
    trainer.fit(module, data)
    for (name, parameter), expected in zip(module.model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    metrics = trainer.callback_metrics
    assert metrics["train_loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    cross_entropy = -log_probs.mean().item()
    assert metrics["train_perplexity"].item() == pytest.approx(math.exp(cross_entropy), rel=1e-5)
    ignored = [tiny_batch(1, 9, num_ignored=9, seed=3), *batches]
    found = trainer.validate(module, DataLoader(ignored, batch_size=None), verbose=False)[0]  # type: ignore[arg-type]
    assert math.isfinite(found["val_loss"])
    assert found["val_loss"] < math.log(found["val_perplexity"])


@pytest.mark.filterwarnings("ignore:You are trying to `self.log\\(\\)`")
def test_causal_lm_takes_the_loss_type() -> None:
    config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    module = LigerCausalLM(config={**config, "num_key_value_heads": 1, "vocab_size": 32}, loss_type="dft")
    module.configure_model()
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    log_probs = stock_log_probs(module.model, [batch])
    torch.testing.assert_close(module.training_step(batch, 0).double(), dft_loss(log_probs).mean(), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="loss_type must be one of 'nll', 'dft', got 'mse'"):
        LigerCausalLM(loss_type="mse")
