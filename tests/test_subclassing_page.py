"""docs/subclassing.md: its module trains as printed, with the term that it adds and without the batch that it skips."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from tests.lightning_liger.tiny import TINY_CONFIG, tiny_batch

PAGE = (Path(__file__).parents[1] / "docs" / "subclassing.md").read_text(encoding="utf-8")
(SOURCE,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_step_is_that_of_the_mean_over_tokens_with_the_penalty_once() -> None:
    scope: dict[str, Any] = {}
    exec(SOURCE, scope)
    module = scope["SmallEmbeddings"](config=TINY_CONFIG)
    module.configure_model()
    stock = AutoModelForCausalLM.from_config(module.config)
    stock.load_state_dict(module.model.state_dict())
    batches = [tiny_batch(2, 11, 4, seed=1), tiny_batch(1, 1, 0), tiny_batch(1, 7, 1, seed=2)]
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 1}
    trainer = L.Trainer(accelerator="cpu", strategy="liger", devices=1, accumulate_grad_batches=3, **options)  # type: ignore[arg-type]
    loaders = [DataLoader([batch], batch_size=None) for batch in batches[::2]]  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(batches, batch_size=None), loaders)  # type: ignore[arg-type]

    counts = [(batch["labels"][:, 1:] != -100).sum() for batch in batches[::2]]
    losses = [stock(**batch).loss * count for batch, count in zip(batches[::2], counts, strict=True)]
    loss = torch.stack(losses).sum() / sum(counts) + 0.01 * stock.get_input_embeddings().weight.square().mean()
    loss.backward()
    torch.optim.SGD(stock.parameters(), lr=0.1).step()
    for got, want in zip(module.model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for index, batch in enumerate(batches[::2]):
        with torch.no_grad():
            want = stock(**batch).loss
        assert trainer.callback_metrics[f"val_loss/dataloader_idx_{index}"].item() == pytest.approx(
            want.item(), rel=1e-5
        )
        assert trainer.callback_metrics[f"longest/dataloader_idx_{index}"] == batch["input_ids"].shape[1]
