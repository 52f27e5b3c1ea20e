"""docs/losses.md: its code runs as printed, and it has every loss and module."""

import re
from pathlib import Path
from typing import Any

import torch

import lightning_liger
from liger_ops.divergence.options import KINDS
from lightning_liger.losses import cpo, dpo, kto, policy_options, tpo
from lightning_liger.losses.distillation_options import MODES
from tests.lightning_liger.tiny import tiny_llama

PAGE = (Path(__file__).parents[1] / "docs" / "losses.md").read_text(encoding="utf-8")


def test_example_gives_scores_and_a_loss() -> None:
    model = tiny_llama()
    lightning_liger.apply_liger_kernels(model)
    input_ids = torch.randint(3, 60, (2, 7))
    scope: dict[str, Any] = {
        "model": model,
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "completion_mask": (torch.arange(7) > 2).long().expand(2, -1),
        "advantages": torch.tensor([1.0, -0.5]),
    }
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(source, scope)
    log_probs = scope["scores"].log_probs
    torch.testing.assert_close(scope["loss"], -(scope["advantages"][:, None] * log_probs).sum())
    assert (log_probs != 0).sum() == 2 * 4


def test_page_has_every_type_of_loss() -> None:
    types = {name for module in (dpo, cpo, tpo, kto, policy_options) for name in module.LOSS_TYPES}
    assert [name for name in sorted({*types, *KINDS, *MODES}) if f"`{name}`" not in PAGE] == []


def test_classes_on_the_page_exist() -> None:
    classes = set(re.findall(r"`(Liger\w+)(?:\(.*?\))?`", PAGE))
    assert len(classes) > 10
    assert [name for name in sorted(classes) if not hasattr(lightning_liger, name)] == []
