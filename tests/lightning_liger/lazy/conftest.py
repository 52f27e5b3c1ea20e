"""Fixtures of the tests of lazy logits."""

import importlib

import pytest


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("lightning_liger.lazy.warning")
    monkeypatch.setattr(module, "_warned_operations", set())
