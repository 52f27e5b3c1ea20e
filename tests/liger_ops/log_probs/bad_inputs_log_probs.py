"""Wrong arguments of linear_log_probs and linear_token_loss."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from liger_ops import linear_log_probs, linear_token_loss
from tests.bad_inputs import BadInput
from tests.liger_ops.loss.bad_inputs_losses import (
    LINEAR,
    LOST,
    OPTIONS,
    WEIGHTS,
    Value,
    learnable,
    make_shard,
    rows,
    shaped,
    values,
)

NAMES = "a sequence of names out of 'log_probs', 'entropy', 'lse', 'mean_logit'"
HEAD: dict[str, list[Value]] = {
    **{name: LINEAR[name] for name in ("input", "linear_weight", "linear_bias", "adapter")},
    "target": [
        *WEIGHTS["target"],
        ("probabilities", shaped(4, 11), ("class indices of dtype torch.int64", "torch.float32")),
    ],
    "logit_scale": OPTIONS["logit_scale"],
    "temperature": [
        ("scalar tensor", partial(torch.tensor, 0.5), ("shape (4,)", "one for each token", "got a tensor of shape ()")),
        ("shape", shaped(4, 1), ("shape (4,)", "one for each token", "got a tensor of shape (4, 1)")),
        ("integers", shaped(4, dtype=torch.int64), ("a floating-point tensor", "torch.int64")),
        ("zero", partial(torch.zeros, 4), ("positive", "got 0.0")),
        ("NaN", partial(torch.full, (4,), math.nan), ("positive", "got nan")),
        (LOST[0], learnable(4), LOST[1]),
    ],
    "outputs": values(NAMES, "log_probs", (), ("log_prob",), (None,), {"log_probs"}),
    "detach": values(NAMES, "entropy", ("correct",), (1,)),
}


def arguments(changes: dict[str, Any]) -> dict[str, Any]:
    return {
        "input": torch.ones(4, 3),
        "linear_weight": torch.ones(11, 3),
        "target": torch.zeros(4, dtype=torch.int64),
        **changes,
    }


def call_scores(**changes: Any) -> Any:
    return linear_log_probs(**arguments(changes))


def call_loss(**changes: Any) -> Any:
    return linear_token_loss(**arguments({"token_loss": lambda scores, index: -scores.log_probs, **changes}))


BAD_INPUTS = [
    *rows("linear_log_probs", call_scores, HEAD),
    *rows("linear_token_loss", call_loss, {name: HEAD[name][:2] for name in HEAD}),
    *rows(
        "linear_token_loss",
        call_loss,
        {
            "token_loss": [
                *(
                    (f"returns {name}", lambda x=x: lambda scores, index: x, (expected, f"got {got}"))
                    for name, x, expected, got in (
                        ("None", None, "a floating-point tensor", "None"),
                        ("a number", 1.5, "a floating-point tensor", "1.5"),
                        ("a list", [1.5], "a floating-point tensor", "[1.5]"),
                        ("integers", torch.ones(4).int(), "a floating-point tensor", "a tensor of shape (4,)"),
                        ("a scalar", torch.tensor(1.0), "one loss for each", "a tensor of shape ()"),
                        ("another shape", torch.ones(4, 1), "one loss for each", "a tensor of shape (4, 1)"),
                    )
                ),
            ]
        },
    ),
    BadInput(
        "linear_log_probs-vocab_shard-past the vocabulary",
        lambda: call_scores(vocab_shard=make_shard(start=6)),
        ("vocab_shard", "vocab_size = 11", "11 rows", "start = 6"),
    ),
]
