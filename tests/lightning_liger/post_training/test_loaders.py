"""Several validation and test loaders: each has the metrics that it has alone, in every module."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerCausalLM, LigerLMMixin, LigerMultipleChoice
from lightning_liger.losses.dpo import DPOOptions
from lightning_liger.losses.kto import KTOOptions
from lightning_liger.losses.policy_options import PolicyOptions
from tests.lightning_liger.post_training.completion_batches import Policy, apart
from tests.lightning_liger.post_training.completion_batches import sequences as completions
from tests.lightning_liger.post_training.preference_data import padded, sequences
from tests.lightning_liger.post_training.test_distillation import Student
from tests.lightning_liger.post_training.test_medusa import Medusa
from tests.lightning_liger.post_training.test_preference import Module as Preference
from tests.lightning_liger.tiny import TINY_CONFIG, tiny_batch, tiny_llama, tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`"),
]
Batch = dict[str, Any]


class LM(LigerLMMixin, L.LightningModule):
    def __init__(self, architecture: str = "llama", **overrides: Any) -> None:
        super().__init__()
        self.model = tiny_model(architecture, **overrides)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LMWithoutTheIndex(LM):
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().test_step(batch, batch_idx)


def text(seed: int) -> Batch:
    return tiny_batch(1 + seed % 2, 7 + seed, seed, seed=seed)


def questions(seed: int) -> Batch:
    counts = {"question_ids": torch.tensor([0, 0, 1]), "num_questions": 2, "num_characters": torch.tensor([3, 5, 4])}
    answers = torch.tensor([seed % 2, 1 - seed % 2, 1])
    return padded(sequences(3, seed=seed)) | counts | {"is_answer": answers}


def labelled(seed: int) -> Batch:
    pairs = padded(sequences(3, seed=seed)) | padded(sequences(3, seed=seed + 10), prefix="KL_")
    return pairs | {"label": torch.tensor([seed % 2, 1 - seed % 2, 1]).bool()}


def mixtral() -> LM:
    return LM("mixtral", num_local_experts=4, output_router_logits=True)


MODULES: dict[str, tuple[Callable[[], L.LightningModule], Callable[[int], Batch]]] = {
    "mixin": (LM, text),
    "override without the index": (LMWithoutTheIndex, text),
    "router": (mixtral, text),
    "causal_lm": (lambda: LigerCausalLM(config=TINY_CONFIG), text),
    "multiple_choice": (lambda: LigerMultipleChoice(config=TINY_CONFIG), questions),
    "dpo": (lambda: Preference(DPOOptions()), lambda seed: padded(sequences(2 + 2 * (seed % 2), seed=seed))),
    "kto": (lambda: Preference(KTOOptions()), labelled),
    "grpo": (lambda: Policy(PolicyOptions(beta=0.1)), lambda seed: apart(completions(3 + seed % 3, seed=seed))),
    "distillation": (lambda: Student(crossentropy_weight=0.5), text),
    "medusa": (lambda: Medusa(tiny_llama()), text),
}


def make_trainer() -> L.Trainer:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 1}
    return L.Trainer(strategy="liger", accelerator="cpu", devices=1, enable_model_summary=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("name", MODULES)
def test_metrics_of_each_loader_are_those_that_it_has_alone(name: str, stage: str) -> None:
    torch.manual_seed(0)
    make, batch_of = MODULES[name]
    loaders = [DataLoader([batch_of(seed) for seed in seeds], batch_size=None) for seeds in ([1, 2], [3], [4, 5, 6])]  # type: ignore[arg-type]
    module = make()
    together = getattr(make_trainer(), stage)(module, loaders, verbose=False)
    for index, (loader, found) in enumerate(zip(loaders, together, strict=True)):
        (alone,) = getattr(make_trainer(), stage)(module, loader, verbose=False)
        want = {f"{key}/dataloader_idx_{index}": value for key, value in alone.items()}
        assert found == pytest.approx(want, nan_ok=True)
    values = [
        found[key]
        for index, found in enumerate(together)
        for key in found
        if key.endswith(f"loss/dataloader_idx_{index}")
    ]
    assert len(set(values)) == len(values)


def test_validation_during_training_starts_again_for_each_loader() -> None:
    module, trainer = LM(), make_trainer()
    loaders = [DataLoader([text(seed)], batch_size=None) for seed in (1, 2)]  # type: ignore[arg-type]
    trainer.fit(module, DataLoader([text(3)], batch_size=None), loaders)  # type: ignore[arg-type]
    for index, loader in enumerate(loaders):
        (alone,) = make_trainer().validate(module, loader, verbose=False)
        assert trainer.callback_metrics[f"val_loss/dataloader_idx_{index}"].item() == pytest.approx(alone["val_loss"])


def test_prompts_of_several_loaders_are_continued() -> None:
    prompts = [DataLoader([{"input_ids": torch.full((1, 3), number)}], batch_size=None) for number in (3, 4)]  # type: ignore[arg-type]
    found = make_trainer().predict(LigerCausalLM(config=TINY_CONFIG, max_new_tokens=2), prompts)
    assert [int(batches[0][0, 0]) for batches in found or []] == [3, 4]
