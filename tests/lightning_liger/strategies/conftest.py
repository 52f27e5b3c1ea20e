"""Strategies out of a yaml."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from lightning_liger.cli import LigerCLI


@pytest.fixture
def made_by_yaml(tmp_path, monkeypatch) -> Callable[..., Any]:
    """The strategy that the command line makes of its part of a yaml."""
    monkeypatch.setattr("sys.argv", ["lightning-liger"])

    def make(strategy: Any, **options: Any) -> Any:
        config = {
            "trainer": {"strategy": strategy, "accelerator": "cpu", "devices": 1, "logger": False, **options},
            "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
            "data": {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return LigerCLI(args=[f"--config={tmp_path / 'config.yaml'}"], run=False).trainer.strategy

    return make
