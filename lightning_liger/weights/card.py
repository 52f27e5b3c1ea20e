"""The README.md of an exported model, a model card of the Hub: what was trained on what."""

import importlib
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import lightning as L
import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData

from lightning_liger.hub import is_hub_name

_KINDS = {"ImageTextDataModule": "images with text", "TeacherTopKDataModule": "stored predictions of a teacher"}


def model_card(
    module: L.LightningModule, checkpoint: Mapping[str, Any], data: str | L.LightningDataModule | None
) -> ModelCard:
    """The card of ``module`` with the weights of ``checkpoint``, which was trained on ``data``, a path or a name."""
    path = data if data is None or isinstance(data, str) else getattr(data, "path", None)
    path = str(path) if isinstance(path, str | PurePath) else None  # no name of records in memory
    saved = checkpoint.get("hyper_parameters") or module.hparams
    settings = {key: value for key, value in saved.items() if value is not None}
    model: Any = module.model
    base, kind = settings.get("pretrained"), type(module).__name__
    version = importlib.import_module("lightning_liger").__version__
    states = checkpoint.get("callbacks", {}).values()
    totals = [state["totals"] for state in states if isinstance(state, dict) and "totals" in state]
    counted = [each["tokens"] for each in totals if "tokens" in each]  # none before the first report
    revision, of_teacher = (
        f" (revision {settings[name]})" if name in settings else "" for name in ("revision", "teacher_revision")
    )
    facts = {
        "Base model": f"{base}{revision}" if base else f"none: random weights ({settings.get('model_type', kind)})",
        "Teacher": f"{settings['teacher']}{of_teacher}" if "teacher" in settings else None,
        "Data": _described(path, data),
        "Trained by": f"{kind}, with the settings below",
        "Optimizer steps": checkpoint.get("global_step"),
        "Tokens": max(counted, default=None),
        "Versions": f"lightning-liger {version}, torch {torch.__version__}, transformers {transformers.__version__}",
    }
    listed = "\n".join(
        f"- {name}: {value:,}" if isinstance(value, int) else f"- {name}: {value}"
        for name, value in facts.items()
        if value is not None
    )
    metadata = ModelCardData(
        base_model=base if is_hub_name(base) else None,
        datasets=path if is_hub_name(path) else None,
        library_name="transformers",
        pipeline_tag="image-text-to-text" if hasattr(model.config, "vision_config") else "text-generation",
        tags=["lightning-liger", kind],
    )
    given = json.dumps(settings, indent=2, default=str)
    head = f"---\n{metadata.to_yaml()}\n---\n\n# {kind}\n\nTrained with lightning-liger."
    return ModelCard(f"{head}\n\n{listed}\n\n```json\n{given}\n```\n")


def _described(path: str | None, data: Any) -> str | None:
    """The data of a data module in words: what, which part, and how they were read."""
    if not isinstance(data, L.LightningDataModule):
        return path
    chosen = {name: getattr(data, name, None) for name in ("subset", "split", "revision", "max_records")}
    parts = [path or "records in memory", *(f"{name} {value}" for name, value in chosen.items() if value is not None)]
    kind = type(data).__name__
    return f"{', '.join(parts)} ({', '.join(filter(None, (_KINDS.get(kind), kind)))})"
