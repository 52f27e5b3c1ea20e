"""Dynamic fine-tuning in the steps of ``LigerLMMixin``, against whole logits of a stock model."""

import math

import pytest
import torch
from torch import Tensor

from lightning_liger import LigerCausalLM
from lightning_liger.losses.sft import dft_loss
from tests.lightning_liger.plain_scores import logits_of, scores_of, targets_of
from tests.lightning_liger.post_training.training import LM, assert_same_parameters, fit, loader
from tests.lightning_liger.tiny import TINY_CONFIG, tiny_batch, tiny_llama


class DFT(LM):
    loss_type = "dft"
    learning_rate = 0.5


def stock_log_probs(model: torch.nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    pairs = [(logits_of(model, batch).double(), targets_of(batch)) for batch in batches]
    return torch.cat([scores_of(logits, targets)[targets != -100] for logits, targets in pairs])


@pytest.mark.parametrize("strategy", ["liger", "auto"])
def test_dft_trains_like_a_loop_on_a_stock_model(strategy: str) -> None:
    batches = [tiny_batch(2, 11, num_ignored=4, seed=1), tiny_batch(1, 7, num_ignored=3, seed=2)]
    stock = tiny_llama()
    log_probs = stock_log_probs(stock, batches)
    loss = -(log_probs.detach().exp() * log_probs).mean()
    loss.backward()
    torch.optim.SGD(stock.parameters(), lr=0.5).step()

    module = DFT()
    trainer = fit(module, batches, strategy=strategy, accumulate_grad_batches=2)
    assert_same_parameters(module.model, stock, rtol=1e-4, atol=1e-6)
    metrics = trainer.callback_metrics
    assert metrics["train_loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    cross_entropy = -log_probs.mean().item()
    assert metrics["train_perplexity"].item() == pytest.approx(math.exp(cross_entropy), rel=1e-5)
    ignored = [tiny_batch(1, 9, num_ignored=9, seed=3), *batches]
    found = trainer.validate(module, loader(ignored), verbose=False)[0]
    assert math.isfinite(found["val_loss"])
    assert found["val_loss"] < math.log(found["val_perplexity"])


def test_causal_lm_takes_the_loss_type() -> None:
    module, batch = LigerCausalLM(config=TINY_CONFIG, loss_type="dft"), tiny_batch()
    module.configure_model()
    loss = dft_loss(stock_log_probs(module.model, [batch])).mean()
    torch.testing.assert_close(module.training_step(batch, 0).double(), loss, rtol=1e-5, atol=0)
