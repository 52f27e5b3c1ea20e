"""Lazy logits that are kept while parameters change."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_liger import LazyLogits
from lightning_liger.lazy.expression import Expression
from lightning_liger.lazy.steps import settle
from tests.lightning_liger.lazy.twin import Saving, Twin, token_loss
from tests.lightning_liger.tiny import quiet_trainer

KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "detached": lambda x: x.detach(),
    "clone": lambda x: x.detach().clone(),
    "float": lambda x: x.float(),
    "slice": lambda x: x[:, 1:],
    "softmax": lambda x: x.detach().softmax(-1),
    "detached_list": lambda x: x.data.flatten(0, 1),
}
REFUSED = ("itself", "float", "slice")
"""What the variables of a loop hold anyway."""


class DataSGD(torch.optim.Optimizer):
    """An optimizer of one's own, whose writes count no version."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("kept", KEPT)
def test_kept_logits_have_the_values_of_before_the_step(kept: str, closure: bool) -> None:
    twin = Twin()
    step = DataSGD(twin.lazy_head.parameters())
    want = KEPT[kept](twin.real).detach().clone()
    found: list[Tensor] = []

    def backward() -> Tensor:
        logits = twin.lazy
        found.append(KEPT[kept](logits))
        loss = token_loss(logits)
        loss.backward()
        return loss

    if closure:
        step.step(backward)
    else:
        backward()
        step.step()
    with torch.no_grad():
        assert (twin.lazy_head(twin.lazy_input) - twin.real).abs().max() > 0.01
    if kept in REFUSED or (closure and kept != "softmax"):
        assert isinstance(found[0], LazyLogits)  # in a loop whose output still exists no real logits are computed
        with pytest.raises(RuntimeError, match=r"materialize\(logits\)"):
            found[0].argmax(-1)
    else:
        assert not isinstance(found[0], LazyLogits)
        torch.testing.assert_close(found[0], want)


def test_step_of_other_parameters_leaves_logits_lazy() -> None:
    twin = Twin()
    logits, other = twin.lazy, nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    DataSGD(other.parameters()).step()
    torch.testing.assert_close(token_loss(logits), token_loss(twin.real))


def test_kept_logits_that_cannot_become_real_are_refused_after_the_step() -> None:
    logits = Twin().lazy
    result = Saving.apply(logits)
    settle("the end")
    with pytest.raises(RuntimeError, match=r"argmax needs logits .* may have changed .*materialize\(logits\)"):
        logits.argmax(-1)
    assert result.requires_grad


class Model(L.LightningModule):
    def __init__(self, kept: str | None = None) -> None:
        super().__init__()
        self.kept, self.num_compared = kept, 0
        self.embedding = nn.Embedding(50, 16)
        self.lm_head = nn.Linear(16, 50, bias=False)
        self.want: list[Tensor] = []
        self.validation: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        hidden_states = self.embedding(batch)
        logits = self.lm_head(hidden_states)
        assert isinstance(logits, LazyLogits)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten())
        if self.kept is None:
            return loss
        self.want.append(KEPT[self.kept](F.linear(hidden_states, self.lm_head.weight)).detach().clone())
        return {"loss": loss, "logits": KEPT[self.kept](logits)}

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if self.kept is not None:
            torch.testing.assert_close(outputs["logits"], self.want[-1])
            self.num_compared += 1

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation.append(self.lm_head(self.embedding(batch)))
        self.want.append(F.linear(self.embedding(batch), self.lm_head.weight))

    def on_validation_epoch_end(self) -> None:
        self.lm_head.weight.data.mul_(2)  # as an average of weights is exchanged for them
        torch.testing.assert_close(self.validation[-1], self.want[-1])
        self.lm_head.weight.data.div_(2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return DataSGD(self.parameters())


def fitted(model: Model, validate: bool = False) -> None:
    data = DataLoader(torch.arange(28).view(4, 7), batch_size=2)  # type: ignore[arg-type]
    trainer = quiet_trainer(strategy="liger", max_steps=3, num_sanity_val_steps=0)
    trainer.fit(model, data, data if validate else None)


@pytest.mark.parametrize("kept", KEPT)
def test_hook_after_the_step_gets_the_logits_of_the_step(kept: str) -> None:
    model = Model(kept)
    fitted(model)
    assert model.num_compared == 3


def test_logits_kept_from_validation_keep_their_values() -> None:
    model = Model()
    fitted(model, validate=True)
    assert len(model.validation) >= 2


def test_nothing_is_materialized_in_a_step_that_keeps_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    monkeypatch.setattr(Expression, "compute", lambda self, operation: computed.append(operation))
    fitted(Model())
    assert computed == []
