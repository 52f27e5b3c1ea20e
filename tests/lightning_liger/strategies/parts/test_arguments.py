"""Arguments that a strategy cannot follow are refused when it is made."""

import inspect

import pytest
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_liger import (
    FabricLigerDDPStrategy,
    FabricLigerDeepSpeedStrategy,
    FabricLigerFSDPStrategy,
    FabricLigerModelParallelStrategy,
    FabricLigerSingleDeviceStrategy,
    LigerDDPStrategy,
    LigerDeepSpeedStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
    LigerSingleDeviceStrategy,
)
from lightning_liger.strategies.parts.checked import _CHECKS

TRAINER = [
    LigerSingleDeviceStrategy,
    LigerDDPStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
    LigerDeepSpeedStrategy,
]
FABRIC = [
    FabricLigerSingleDeviceStrategy,
    FabricLigerDDPStrategy,
    FabricLigerFSDPStrategy,
    FabricLigerModelParallelStrategy,
    FabricLigerDeepSpeedStrategy,
]


@pytest.mark.parametrize("strategy", TRAINER + FABRIC, ids=lambda strategy: strategy.__name__)
@pytest.mark.parametrize("misspelled", ["kernel", "fault_tolerant", "use_orig_param", "find_unused_parameter"])
def test_misspelled_argument_is_refused_by_name(strategy, misspelled):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{misspelled}'"):
        strategy(**{misspelled: True})


@pytest.mark.parametrize(
    ("strategy", "misspelled", "similar"),
    [(LigerFSDPStrategy, "use_orig_param", "use_orig_params"), (LigerDDPStrategy, "static_grap", "static_graph")],
)
def test_refusal_names_the_similar_argument(strategy, misspelled, similar):
    with pytest.raises(TypeError, match=f"did you mean .*'{similar}'"):
        strategy(**{misspelled: True})


@pytest.mark.parametrize("strategy", [LigerFSDPStrategy, FabricLigerFSDPStrategy])
def test_arguments_of_the_engine_are_taken(strategy):
    made = strategy(use_orig_params=True, limit_all_gathers=False)
    assert made._fsdp_arguments["limit_all_gathers"] is False


@pytest.mark.parametrize("strategy", [*FABRIC, LigerDeepSpeedStrategy], ids=lambda strategy: strategy.__name__)
def test_arguments_of_other_strategies_are_refused_unless_they_change_nothing(strategy):
    strategy(on_nonfinite_grad="ignore", context_parallel_size=1)
    with pytest.raises(ValueError, match=rf"{strategy.__name__} does not support on_nonfinite_grad='skip', only 'ign"):
        strategy(on_nonfinite_grad="skip")
    with pytest.raises(ValueError, match=rf"{strategy.__name__} does not support context_parallel_size=2, only 1: use"):
        strategy(context_parallel_size=2)


@pytest.mark.parametrize(
    "taker", [*TRAINER, *FABRIC, DistributedDataParallel, FullyShardedDataParallel], ids=lambda taker: taker.__name__
)
def test_every_default_passes_its_check(taker):
    # The command line gives each argument that a yaml leaves out as its default.
    parameters = {}
    for cls in reversed(taker.__mro__):
        parameters |= inspect.signature(cls.__init__).parameters
    for name, parameter in parameters.items():
        if name in _CHECKS and parameter.default is not inspect.Parameter.empty:
            _CHECKS[name](name, parameter.default)


@pytest.mark.parametrize("strategy", TRAINER + FABRIC, ids=lambda strategy: strategy.__name__)
def test_every_overridden_private_method_is_checked(strategy):
    ours = [cls for cls in strategy.__mro__ if cls.__module__.startswith("lightning_liger")]
    lightnings = [cls for cls in strategy.__mro__ if cls.__module__.startswith("lightning.")]
    methods = {name for cls in ours for name, value in vars(cls).items() if callable(value) and not name.endswith("__")}
    private = {name for name in methods if name.startswith("_") and any(name in vars(cls) for cls in lightnings)}
    assert set(strategy._overridden) == private


@pytest.mark.parametrize("strategy", [LigerFSDPStrategy, LigerDeepSpeedStrategy, FabricLigerDeepSpeedStrategy])
def test_lightning_without_an_overridden_method_is_refused(monkeypatch, strategy):
    (name, *_) = strategy._overridden
    (owner,) = [cls for cls in strategy.__mro__ if cls.__module__.startswith("lightning.") and name in vars(cls)][:1]
    others = [cls for cls in owner.__mro__[1:] if name in vars(cls)]
    for cls in (owner, *others):
        monkeypatch.delattr(cls, name)
    with pytest.raises(RuntimeError, match=f"overrides {name}, which lightning .* does not have: install a version"):
        strategy()
