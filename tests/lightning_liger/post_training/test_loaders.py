"""Several validation and test loaders: each has the metrics that it has alone, in every module."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_liger import LigerCausalLM, LigerMultipleChoice
from lightning_liger.losses.dpo import DPOOptions
from lightning_liger.losses.kto import KTOOptions
from lightning_liger.losses.policy_options import PolicyOptions
from tests.lightning_liger.post_training.completion_batches import Policy, apart
from tests.lightning_liger.post_training.completion_batches import sequences as completions
from tests.lightning_liger.post_training.preference_data import padded, sequences
from tests.lightning_liger.post_training.test_distillation import Student
from tests.lightning_liger.post_training.test_medusa import Medusa
from tests.lightning_liger.post_training.test_preference import Module as Preference
from tests.lightning_liger.post_training.training import LM, loader
from tests.lightning_liger.tiny import TINY_CONFIG, quiet_trainer, tiny_batch, tiny_llama, tiny_model

Batch = dict[str, Any]


class LMWithoutTheIndex(LM):
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().validation_step(batch, batch_idx)


def text(seed: int) -> Batch:
    return tiny_batch(1 + seed % 2, 7 + seed, seed, seed=seed)


def questions(seed: int) -> Batch:
    counts = {"question_ids": torch.tensor([0, 0, 1]), "num_questions": 2, "num_characters": torch.tensor([3, 5, 4])}
    answers = torch.tensor([seed % 2, 1 - seed % 2, 1])
    return padded(sequences(3, seed=seed)) | counts | {"is_answer": answers}


def labeled(seed: int) -> Batch:
    pairs = padded(sequences(3, seed=seed)) | padded(sequences(3, seed=seed + 10), prefix="KL_")
    return pairs | {"label": torch.tensor([seed % 2, 1 - seed % 2, 1]).bool()}


def mixtral() -> LM:
    return LM(tiny_model("mixtral", num_local_experts=4, output_router_logits=True))


MODULES: dict[str, tuple[Callable[[], L.LightningModule], Callable[[int], Batch]]] = {
    "mixin": (LM, text),
    "override without the index": (LMWithoutTheIndex, text),
    "router": (mixtral, text),
    "causal_lm": (lambda: LigerCausalLM(config=TINY_CONFIG), text),
    "multiple_choice": (lambda: LigerMultipleChoice(config=TINY_CONFIG), questions),
    "dpo": (lambda: Preference(DPOOptions()), lambda seed: padded(sequences(2 + 2 * (seed % 2), seed=seed))),
    "kto": (lambda: Preference(KTOOptions()), labeled),
    "grpo": (lambda: Policy(PolicyOptions(beta=0.1)), lambda seed: apart(completions(3 + seed % 3, seed=seed))),
    "distillation": (lambda: Student(crossentropy_weight=0.5), text),
    "medusa": (lambda: Medusa(tiny_llama()), text),
}


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("name", MODULES)
def test_metrics_of_each_loader_are_those_that_it_has_alone(name: str, stage: str) -> None:
    torch.manual_seed(0)
    make, batch_of = MODULES[name]
    loaders = [loader([batch_of(seed) for seed in seeds]) for seeds in ([1, 2], [3], [4, 5, 6])]
    module, losses = make(), set()
    together = getattr(quiet_trainer(strategy="liger"), stage)(module, loaders, verbose=False)
    for index, (data, found) in enumerate(zip(loaders, together, strict=True)):
        (alone,) = getattr(quiet_trainer(strategy="liger"), stage)(module, data, verbose=False)
        want = {f"{key}/dataloader_idx_{index}": value for key, value in alone.items()}
        assert found == pytest.approx(want, nan_ok=True)
        losses.update(value for key, value in alone.items() if key in ("val_loss", "test_loss"))
    assert len(losses) == len(loaders)


def test_prompts_of_several_loaders_are_continued() -> None:
    prompts = [loader([{"input_ids": torch.full((1, 3), number)}]) for number in (3, 4)]
    found = quiet_trainer(strategy="liger").predict(LigerCausalLM(config=TINY_CONFIG, max_new_tokens=2), prompts)
    assert [int(batches[0][0, 0]) for batches in found or []] == [3, 4]
