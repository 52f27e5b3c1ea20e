"""An LSTM and a transformer that predict the next item out of a large catalog."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_liger import LigerLMMixin

from .data import IGNORE_INDEX
from .metrics import RankMetrics, label_ranks


class Output(NamedTuple):
    """As the outputs of Hugging Face's models."""

    last_hidden_state: Tensor | None = None
    """``[batch_size, seq_len, hidden_size]``."""
    logits: Tensor | None = None
    """``[batch_size, seq_len, num_items]``."""


class LSTMEncoder(nn.Module):
    """Embeddings of items and an LSTM over them."""

    def __init__(self, num_items: int, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(num_items, hidden_size)
        self.lstm = nn.LSTM(hidden_size, hidden_size, num_layers, batch_first=True)
        self.norm = nn.LayerNorm(hidden_size)

    def forward(self, input_ids: Tensor) -> Output:
        return Output(last_hidden_state=self.norm(self.lstm(self.embed_tokens(input_ids))[0]))


class LSTMForNextItem(nn.Module):
    """An LSTM with one matrix for the embeddings and the head, and the names of ``LlamaForCausalLM``."""

    def __init__(self, num_items: int, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.model = LSTMEncoder(num_items, hidden_size, num_layers)
        self.lm_head = nn.Linear(hidden_size, num_items, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> Output:
        return Output(logits=self.lm_head(self.model(input_ids).last_hidden_state))


class NextItem(LigerLMMixin, L.LightningModule):
    """Predicts the next item of a sequence. The loss over the whole catalog has no logits in memory.

    Validation and test log ``hit@1``, ``hit@5``, ``hit@10`` and ``mrr`` over the whole catalog, besides the metrics
    of :class:`~lightning_liger.LigerLMMixin`.

    Args:
        num_items: Size of the catalog, that of ``data.course``.
        encoder: ``"transformer"`` (a Llama) or ``"lstm"``.
        hidden_size: Width of the embeddings and of the layers.
        num_layers: Layers.
        num_heads: Attention heads of the transformer.
        learning_rate: Peak learning rate of AdamW, in a schedule of one cycle.
        weight_decay: Decay of all parameters.

    Raises:
        ValueError: If ``num_items`` is not the number of items of the data.
    """

    model: Any
    """An :class:`LSTMForNextItem` or a ``LlamaForCausalLM``."""

    def __init__(
        self,
        num_items: int,
        encoder: Literal["transformer", "lstm"] = "transformer",
        hidden_size: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.val_ranks, self.test_ranks = RankMetrics("val_"), RankMetrics("test_")

    def setup(self, stage: str) -> None:
        course = getattr(getattr(self.trainer, "datamodule", None), "course", None)
        if course is not None and course.num_items != self.hparams["num_items"]:
            raise ValueError(
                f"num_items must be {course.num_items}, the catalog of data.course, got {self.hparams['num_items']}"
            )

    def configure_model(self) -> None:
        if getattr(self, "model", None) is not None:
            return
        num_items, hidden_size = self.hparams["num_items"], self.hparams["hidden_size"]
        if self.hparams["encoder"] == "lstm":
            self.model = LSTMForNextItem(num_items, hidden_size, self.hparams["num_layers"])
        else:
            self.model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=num_items,
                    hidden_size=hidden_size,
                    intermediate_size=4 * hidden_size,
                    num_hidden_layers=self.hparams["num_layers"],
                    num_attention_heads=self.hparams["num_heads"],
                    tie_word_embeddings=True,
                    bos_token_id=None,
                    eos_token_id=None,
                )
            )
        nn.init.normal_(self.model.lm_head.weight, std=hidden_size**-0.5)  # logits of a fair size from the start

    @torch.no_grad()
    def ranks(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The rank of each label that is not ignored, ``[num_labels]``; see :func:`~.metrics.label_ranks`."""
        hidden_states = self.model.model(input_ids).last_hidden_state
        kept = labels != IGNORE_INDEX
        return label_ranks(hidden_states[kept], self.model.lm_head.weight, labels[kept])

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        return self._evaluate("val", self.val_ranks, batch)

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        return self._evaluate("test", self.test_ranks, batch)

    def _evaluate(self, stage: str, metrics: RankMetrics, batch: Mapping[str, Any]) -> Tensor:
        batch = dict(batch)
        kinds, labels = batch.pop("kinds"), batch["shift_labels"]
        metrics.update_ranks(self.ranks(batch["input_ids"], labels), kinds[labels != IGNORE_INDEX])
        self.log_dict(metrics, on_step=False, on_epoch=True)
        return super().validation_step(batch, 0) if stage == "val" else super().test_step(batch, 0)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        rate, decay = self.hparams["learning_rate"], self.hparams["weight_decay"]
        optimizer = torch.optim.AdamW(self.parameters(), lr=rate, weight_decay=decay, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rate, total_steps=int(self.trainer.estimated_stepping_batches), pct_start=0.1
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
