"""``LigerLMMixin``: what its default steps log, against numbers computed by hand, and what they refuse."""

import math
import traceback
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, LigerLMMixin
from lightning_liger.host_copy import HostCopy
from tests.lightning_liger.tiny import quiet_trainer, tiny_batch, tiny_llama

Batch = dict[str, Tensor]


class LM(LigerLMMixin, L.LightningModule):
    """A tiny Llama whose optimizer moves nothing, so that every batch of an epoch sees the same model."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = tiny_llama()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batches(all_ignored: bool = False) -> list[Batch]:
    """Two batches of unequal size with ignored labels, every second label the likeliest; a third without labels."""
    result = [tiny_batch(2, 11, num_ignored=4, seed=1), tiny_batch(1, 7, num_ignored=3, seed=2)]
    for batch in result:
        with torch.no_grad():
            likeliest = tiny_llama()(input_ids=batch["input_ids"]).logits.argmax(-1)[:, :-1]
        targets = batch["labels"][:, 1:]
        targets[:, ::2] = torch.where(targets[:, ::2] == -100, -100, likeliest[:, ::2])
    return result + [tiny_batch(1, 9, num_ignored=9, seed=3)] * all_ignored


def expected_metrics(stage: str) -> dict[str, float]:
    """Over the tokens of all batches, from the unpatched model's whole logits."""
    losses, correct = [], []
    for batch in batches():
        with torch.no_grad():
            logits = tiny_llama()(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1).double()
        targets = batch["labels"][:, 1:].flatten()
        kept = targets != -100
        losses.append(F.cross_entropy(logits[kept], targets[kept], reduction="none"))
        correct.append(logits[kept].argmax(-1) == targets[kept])
    assert len(losses[0]) != len(losses[1])
    loss, accuracy = torch.cat(losses).mean().item(), torch.cat(correct).double().mean().item()
    assert 0.2 < accuracy < 0.8
    return {f"{stage}_loss": loss, f"{stage}_perplexity": math.exp(loss), f"{stage}_mean_token_accuracy": accuracy}


def run(
    stage: str, module: L.LightningModule, data: list[Batch], callbacks: list[L.Callback], strategy: str = "auto"
) -> dict[str, float]:
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, callbacks=callbacks)
    loader = DataLoader(data, batch_size=None)
    if stage == "train":
        trainer.fit(module, loader, loader)
    else:
        (trainer.validate if stage == "val" else trainer.test)(module, loader, verbose=False)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("all_ignored", [False, True], ids=["labels", "a_batch_without_labels"])
@pytest.mark.parametrize("patched", [True, False], ids=["patched", "unpatched"])
@pytest.mark.parametrize("stage", ["train", "val", "test"])
def test_default_step_logs_metrics_over_all_tokens_of_the_epoch(stage: str, patched: bool, all_ignored: bool) -> None:
    module = LM()
    logged = run(stage, module, batches(all_ignored), [LigerCallback()] if patched else [])
    expected = expected_metrics(stage) | (expected_metrics("val") if stage == "train" else {})
    assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert logged.keys() - expected.keys() == ({"train_loss_step"} if stage == "train" else set())
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    if patched:
        ledger = module.model.lm_head.fusion_counters
        num_batches = len(batches(all_ignored)) * (2 if stage == "train" else 1)
        num_sanity_checks = 2 if stage == "train" else 0
        assert (ledger.num_losses, ledger.num_materialized) == (num_batches + num_sanity_checks, 0)


def test_compiled_module_trains_and_logs_as_it_does_without() -> None:
    module = LM()
    module.configure_model()
    compiled = run("train", torch.compile(module, backend="eager"), batches()[:1], [], strategy="liger")
    assert compiled == pytest.approx(run("train", LM(), batches()[:1], [], strategy="liger"), rel=1e-5)


class HostReads(TorchDispatchMode, L.Callback):
    """Where the host reads a tensor's value in the middle batches of an epoch, except what the progress bar shows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.shown: list[float | None] = []
        self.losses: list[float] = []
        self._shown_loss: Tensor | None = None
        self._counts = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reads = func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        if self._counts and reads and (self._shown_loss is None or args[0].data_ptr() != self._shown_loss.data_ptr()):
            self.found += ["".join(traceback.format_stack(limit=8))]
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._shown_loss = module.shown_loss.newest
        self._counts = batch_idx in (1, 2)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        counts, self._counts = self._counts, False
        self.shown.append(trainer.progress_bar_metrics.get("train_loss_step"))
        self.losses.append(trainer.callback_metrics["train_loss_step"].item())
        self._counts = counts


@pytest.mark.parametrize("is_late", [False, True], ids=["cpu", "late"])
@pytest.mark.parametrize("normalization", ["tokens", "micro_batch"])
def test_no_training_step_waits_for_the_device(
    normalization: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each value that the host reads is a wait; the progress bar shows one that is on the host already."""
    if is_late:  # a copy arrives once the next one was started
        monkeypatch.setattr(HostCopy, "has_arrived", lambda copy: copy is not module.shown_loss._copies[-1])
    module, reads = LM(), HostReads()
    module.loss_normalization = normalization
    with reads:
        run("train", module, batches() * 2, [LigerCallback(), reads])
    assert reads.found == []
    losses = reads.losses
    assert len(set(losses)) == 2
    assert reads.shown == ([None, None, *losses[1:3]] if is_late else [None, *losses[1:]])
