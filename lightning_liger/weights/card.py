"""The README.md of an exported model, a model card of the Hub: what was trained on what."""

import importlib
import json
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData

from lightning_liger.hub import is_hub_name


def model_card(module: L.LightningModule, checkpoint: Mapping[str, Any], data: str | None) -> ModelCard:
    """The card of ``module`` with the weights of ``checkpoint``, which was trained on ``data``, a path or a name."""
    saved = checkpoint.get("hyper_parameters") or module.hparams
    settings = {key: value for key, value in saved.items() if value is not None}
    base, kind = settings.get("pretrained"), type(module).__name__
    version = importlib.import_module("lightning_liger").__version__
    states = checkpoint.get("callbacks", {}).values()
    counted = [state["totals"]["tokens"] for state in states if isinstance(state, dict) and "totals" in state]
    revision = f" (revision {settings['revision']})" if "revision" in settings else ""
    facts = {
        "Base model": f"{base}{revision}" if base else f"none: random weights ({settings.get('model_type', kind)})",
        "Data": data,
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
        datasets=data if is_hub_name(data) else None,
        library_name="transformers",
        tags=["lightning-liger", kind],
    )
    given = json.dumps(settings, indent=2, default=str)
    head = f"---\n{metadata.to_yaml()}\n---\n\n# {kind}\n\nTrained with lightning-liger."
    return ModelCard(f"{head}\n\n{listed}\n\n```json\n{given}\n```\n")
