"""Models that rank items by the probability of a click, with a softmax over all item ids as a second task."""

from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC, BinaryCalibrationError

from lightning_liger import lazy_logits

from .data import Batch, ClickData
from .layers import DenseGating, IsotonicCalibration, ResidualCross

IGNORE_INDEX = -100
NUM_BINS = 20
"""Bins of the calibration error."""


class Outputs(NamedTuple):
    """Of one batch."""

    clicks: Tensor
    """``[batch_size]``: logits of a click on the row's item."""
    ids: Tensor | None
    """``[batch_size, num_ids]``: logits of each item being the one that is clicked; None without this task."""


class ClickNetwork(nn.Module):
    """Embeddings of ids, then crosses of features next to layers of neurons; and a tower that predicts the item.

    The tower sees all columns but those that describe the item.

    Args:
        vocab_sizes: Number of ids in each category.
        num_numbers: Number of further features.
        embedding_size: Width of the embeddings.
        hidden_sizes: Widths of the layers.
        num_crosses: Number of cross layers; 0 leaves them out.
        gating: Whether layers have a gate.
        predicts_ids: Whether there is a tower.
        item_columns: Categories that describe the item; the first one is its id.
    """

    def __init__(
        self,
        vocab_sizes: list[int],
        num_numbers: int,
        embedding_size: int,
        hidden_sizes: list[int],
        num_crosses: int,
        gating: bool,
        predicts_ids: bool,
        item_columns: list[int],
    ) -> None:
        super().__init__()
        embeddings = [nn.Embedding(size, embedding_size) for size in vocab_sizes]
        for embedding in embeddings:
            nn.init.normal_(embedding.weight, std=0.3)
        self.embeddings = nn.ModuleList(embeddings)
        size = num_numbers + embedding_size * len(vocab_sizes)
        self.crosses = nn.ModuleList(ResidualCross(size, size // 2) for _ in range(num_crosses))
        layers: list[nn.Module] = []
        for in_size, out_size in zip([size, *hidden_sizes], hidden_sizes, strict=False):
            layers += [DenseGating(in_size, out_size) if gating else nn.Linear(in_size, out_size), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.click_head = nn.Linear(hidden_sizes[-1] + (size if num_crosses else 0), 1)
        self.context_columns = [column for column in range(len(vocab_sizes)) if column not in item_columns]
        self.tower: nn.Module | None = None
        self.id_head: nn.Linear | None = None
        if predicts_ids:
            self.tower = nn.Sequential(
                nn.Linear(embedding_size * len(self.context_columns), hidden_sizes[-1]),
                nn.ReLU(),
                nn.Linear(hidden_sizes[-1], embedding_size),
            )
            self.id_head = nn.Linear(embedding_size, vocab_sizes[item_columns[0]])

    def get_output_embeddings(self) -> nn.Linear | None:
        """The head whose logits are never materialized."""
        return self.id_head

    def forward(self, numbers: Tensor, ids: Tensor) -> Outputs:
        embedded = [embedding(ids[:, column]) for column, embedding in enumerate(self.embeddings)]
        features = crossed = torch.cat((numbers, *embedded), dim=1)
        for layer in self.crosses:
            crossed = layer(features, crossed)
        found = [self.layers(features), *([crossed] if self.crosses else [])]
        id_logits = None
        if self.tower is not None and self.id_head is not None:
            id_logits = self.id_head(
                self.tower(torch.cat([embedded[column] for column in self.context_columns], dim=1))
            )
        return Outputs(self.click_head(torch.cat(found, dim=1)).squeeze(1), id_logits)


class Ranker(L.LightningModule):
    """Trains a :class:`ClickNetwork` on clicks and, by a softmax over all ids, on the ids that were clicked.

    Tests log ``test_auc``, ``test_log_loss``, ``test_calibration_error`` (the mean distance of predicted and found
    click rates over 20 bins) and ``test_id_loss`` (the cross entropy of clicked ids).

    Args:
        num_crosses: Cross layers of DCN-v2; 0 leaves them out.
        gating: Whether layers have a gate.
        calibration: Whether clicks of each validation fit an isotonic calibration, which the test then uses.
        id_loss_weight: Factor of the cross entropy of clicked ids; 0 leaves the task out.
        item_columns: Categories that describe the item; the first one is its id.
        embedding_size: Width of the embeddings.
        hidden_sizes: Widths of the layers.
        learning_rate: Of Adam.
    """

    model: ClickNetwork

    def __init__(
        self,
        num_crosses: int = 2,
        gating: bool = True,
        calibration: bool = True,
        id_loss_weight: float = 0.1,
        item_columns: list[int] = [0, 1],  # noqa: B006
        embedding_size: int = 16,
        hidden_sizes: list[int] = [128, 64],  # noqa: B006
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.calibration = IsotonicCalibration() if calibration else None
        self.test_auc, self.test_log_loss = BinaryAUROC(), MeanMetric()
        self.test_calibration_error = BinaryCalibrationError(n_bins=NUM_BINS)
        self.test_id_loss = MeanMetric()
        self._validation: list[tuple[Tensor, Tensor]] = []

    def configure_model(self) -> None:
        """Builds the network for the categories of the data."""
        if getattr(self, "model", None) is not None:
            return
        data: ClickData = self.trainer.datamodule  # type: ignore[attr-defined]
        names = ("embedding_size", "hidden_sizes", "num_crosses", "gating", "item_columns")
        self.model = ClickNetwork(
            data.vocab_sizes,
            data.num_numbers,
            predicts_ids=self.hparams["id_loss_weight"] > 0,
            **{name: self.hparams[name] for name in names},
        )
        if self.model.id_head is not None:  # the popularity of ids need not be learned
            with torch.no_grad():
                self.model.id_head.bias.copy_(data.click_shares(self.hparams["item_columns"][0]).log())

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        """Logits of clicks, ``[batch_size]``, calibrated if there is a calibration."""
        logits = self.model(numbers, ids).clicks
        return logits if self.calibration is None else self.calibration(logits)

    def _id_loss(self, id_logits: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
        """The sum of the cross entropies of clicked ids; rows without a click cost nothing."""
        items = ids[:, self.hparams["item_columns"][0]]
        targets = torch.where(labels == 1, items, IGNORE_INDEX)
        return F.cross_entropy(id_logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels, numbers, ids = batch
        outputs = self.model(numbers, ids)
        loss = F.binary_cross_entropy_with_logits(outputs.clicks, labels)
        self.log("train_log_loss", loss.detach(), prog_bar=True)
        if outputs.ids is not None:
            id_loss = self._id_loss(outputs.ids, labels, ids) / labels.sum().clamp(min=1)
            self.log("train_id_loss", id_loss.detach())
            loss = loss + self.hparams["id_loss_weight"] * id_loss
        return loss

    def on_validation_epoch_start(self) -> None:
        self._validation = []

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        labels, numbers, ids = batch
        logits = self.model(numbers, ids).clicks
        self._validation.append((logits, labels))
        self.log("val_log_loss", F.binary_cross_entropy_with_logits(logits, labels), prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        if self.calibration is not None:
            logits, labels = (torch.cat(column) for column in zip(*self._validation, strict=True))
            with torch.inference_mode(False):
                self.calibration.fit(logits.float().clone(), labels.clone())

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        labels, numbers, ids = batch
        with lazy_logits():  # without gradients a head returns real logits elsewhere
            outputs = self.model(numbers, ids)
            if outputs.ids is not None:
                num_clicks = labels.sum()
                self.test_id_loss.update(self._id_loss(outputs.ids, labels, ids) / num_clicks.clamp(min=1), num_clicks)
                self.log("test_id_loss", self.test_id_loss)
        logits = outputs.clicks if self.calibration is None else self.calibration(outputs.clicks)
        for name, value in self._metrics(logits.float(), labels).items():
            self.log(name, value)

    def _metrics(self, logits: Tensor, labels: Tensor) -> dict[str, Any]:
        probabilities = logits.sigmoid()
        self.test_auc.update(logits, labels.int())
        self.test_calibration_error.update(probabilities, labels.int())
        self.test_log_loss.update(F.binary_cross_entropy_with_logits(logits, labels, reduction="none"))
        names = ("test_auc", "test_log_loss", "test_calibration_error")
        return {name: getattr(self, name) for name in names}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        rate = self.hparams["learning_rate"]
        optimizer = torch.optim.Adam(self.model.parameters(), lr=rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
