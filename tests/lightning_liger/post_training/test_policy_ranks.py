"""``LigerPolicyMixin`` on two ranks, which split the batch or each row, against one process with the stock model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_liger.losses.policy_options import PolicyOptions
from tests.lightning_liger.post_training.completion_batches import (
    assert_same_weights,
    expected_loss,
    pad,
    sequences,
    stock_scores,
)
from tests.lightning_liger.post_training.workers.policy import COLUMNS, RUNS
from tests.lightning_liger.strategies.workers.distributed import launch
from tests.lightning_liger.tiny import tiny_llama


def masked_loss(model: nn.Module, examples: list[dict[str, Any]]) -> Tensor:
    """DAPO of the tokens whose entropy is at least the median of all."""
    log_probs, entropies = stock_scores(model, examples)
    mask = pad([example["tool_mask"] for example in examples]).bool()
    kept = mask & (entropies >= torch.quantile(entropies[mask], 0.5))
    advantages = torch.stack([example["advantages"] for example in examples])[:, None].double()
    ratio = (log_probs - pad([example["old_per_token_logps"] for example in examples])).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)[kept].sum() / mask.sum()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    worker = "tests.lightning_liger.post_training.workers.policy"
    return launch("cpu", tmp_path_factory.mktemp("ranks"), worker=worker)


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_like_one_process_with_all_sequences(ranks: list[dict[str, Any]], name: str) -> None:
    examples, options = sequences(6, columns=COLUMNS), RUNS[name].options
    stock = tiny_llama()
    loss = masked_loss(stock, examples) if name == "entropy mask" else expected_loss(stock, examples, options)
    loss.backward()
    torch.optim.SGD(stock.parameters(), lr=0.3).step()
    _, entropies = stock_scores(tiny_llama(), examples)
    mask = pad([example["tool_mask"] for example in examples]).bool()
    for result in ranks:
        model = tiny_llama()
        model.load_state_dict(result[name]["weights"], strict=False)
        assert_same_weights(model, stock)
        metrics = result[name]["metrics"]
        assert metrics["train_loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["train_loss_step"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["train_entropy"] == pytest.approx(entropies[mask].mean().item(), rel=1e-4)
        assert metrics["train_completions/max_length"] == mask.sum(1).max()
        num_tokens = sum(len(x["prompt_ids"]) + len(x["completion_ids"]) for x in examples)
        padding = metrics["train_num_tokens"] - num_tokens
        assert padding == 0 or (name == "context packed" and padding == 1)
    assert isinstance(options, PolicyOptions)
