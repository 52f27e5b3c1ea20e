"""Wrong arguments of strategies that signatures do not tell, refused when the strategy is made."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_liger import (
    LigerDDPStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
)
from lightning_liger.strategies.registration import REGISTRATIONS
from tests.bad_inputs import annotations_of, row

CLASSES = {each for registration in REGISTRATIONS for each in (registration.trainer, registration.fabric)}
CLASSES = sorted(CLASSES, key=lambda cls: cls.__name__)
LAYERS, BUDGET, POLICY, WRAP = (
    "activation_checkpointing", "memory_budget", "activation_checkpointing_policy", "auto_wrap_policy"
)  # fmt: skip
CHOICES: dict[str, Any] = {LAYERS: "full", POLICY: ["Layer"], BUDGET: 0.5}
"""Arguments that choose the layers to recompute, of which one may be given."""

# Of each strategy with the argument: its wrong value, and what the message says.
WRONG: list[tuple[Any, ...]] = [
    ("kernels", {"rope": {"no": 1}}, "rope", "'no': 1"),
    (LAYERS, {int}, "int", "a class or its name"),
    (POLICY, ["no.Layer"], "no.Layer", "cannot be imported"),
    (LAYERS, ["no.Layer"], "no.Layer", "cannot be imported"),
    (LAYERS, ["torch.nn.functional.linear"], "torch.nn.functional.linear", "subclasses of torch.nn.Module"),
    (WRAP, {int}, "int", "a class or its name"),
    (WRAP, ["no.Layer"], "no.Layer", "cannot be imported"),
]


def fit(**arguments: Any) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, barebones=True, **arguments)
    trainer.fit(BoringModel())


BAD_INPUTS = [
    *(
        row(partial(cls, **{argument: value}), argument, *mentions)
        for cls in CLASSES
        for argument, value, *mentions in WRONG
        if argument in annotations_of(cls)
    ),
    *(
        row(partial(cls, **{first: CHOICES[first], second: CHOICES[second]}), f"{first}=", second, "must be None")
        for cls in CLASSES
        for first, second in itertools.combinations(CHOICES, 2)
        if {first, second} <= set(annotations_of(cls))
    ),
    *(row(partial(cls, precission=5), "unexpected keyword argument", "'precission'") for cls in CLASSES),
    row(partial(LigerDDPStrategy, kernel="none"), "unexpected keyword argument 'kernel'", "did you mean 'kernels'"),
    row(partial(LigerFSDPStrategy, use_orig_param=True), "'use_orig_param'; did you mean", "'use_orig_params'"),
    row(
        lambda: fit(strategy=LigerDDPStrategy(context_parallel_size=2)),
        *("context_parallel_size=2 must divide", "processes, which is 1"),
    ),
    row(
        lambda: fit(strategy=LigerModelParallelStrategy(tensor_parallel_size=4)),
        *("tensor_parallel_size", "a divisor of the number of processes, 1", "got 4"),
    ),
    row(
        lambda: fit(strategy=LigerModelParallelStrategy(expert_parallel_size=4)),
        *("expert_parallel_size", "a divisor of the number of processes, 1", "got 4"),
    ),
    row(
        partial(LigerModelParallelStrategy, tensor_parallel_size=2, expert_parallel_size=2),
        *("expert_parallel_size", "1 with tensor_parallel_size=2", "got 2"),
    ),
]
