"""The table of registered names."""

import lightning as L
import pytest
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

import lightning_liger
from lightning_liger.strategies import register_strategies
from lightning_liger.strategies.registration import REGISTRATIONS

NAMES = [registration.name for registration in REGISTRATIONS]


@pytest.mark.parametrize("registration", REGISTRATIONS, ids=NAMES)
def test_name_is_registered_with_its_class_and_options(registration):
    for registry, strategy in ((StrategyRegistry, registration.trainer), (STRATEGY_REGISTRY, registration.fabric)):
        assert registry[registration.name]["strategy"] is strategy
        assert registry[registration.name]["init_params"] == registration.options
        assert "never materializes the logits" in registry[registration.name]["description"]
        assert type(registry.get(registration.name)) is strategy


def test_every_strategy_has_a_name_and_is_public():
    classes = {cls for registration in REGISTRATIONS for cls in registration[1:3]}
    public = {
        value
        for value in vars(lightning_liger).values()
        if isinstance(value, type) and issubclass(value, L.fabric.strategies.Strategy | L.pytorch.strategies.Strategy)
    }
    assert classes == public


def test_names_are_registered_once_and_keep_what_took_them_first(monkeypatch):
    # The entry, not the registry: monkeypatch would restore what the registry's `get` returns, a strategy.
    monkeypatch.setitem(StrategyRegistry["liger_ddp"], "strategy", dict)
    register_strategies()
    assert StrategyRegistry["liger_ddp"]["strategy"] is dict
    assert StrategyRegistry.available_strategies().count("liger_ddp") == 1
