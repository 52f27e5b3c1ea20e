"""Bad options and arguments of preference losses."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_liger.losses.cpo import CPOOptions
from lightning_liger.losses.dpo import DPOOptions, PairLogProbs, dpo_loss
from lightning_liger.losses.kto import KTOOptions, kto_loss
from lightning_liger.losses.orpo import ORPOOptions
from lightning_liger.losses.sequences import sequence_sums
from lightning_liger.losses.tpo import TPOOptions, tpo_loss
from tests.bad_inputs import BadInput

NUMBER = "a finite number"
_POSITIVE = [("zero", 0, "0", "above 0"), ("nan", math.nan, "nan", NUMBER), ("text", "0.1", "'0.1'", NUMBER)]
_NUMBER = [("infinite", math.inf, "inf", NUMBER), ("none", None, "None", NUMBER), ("bool", True, "True", NUMBER)]
_WEIGHT = [("negative", -1.0, "-1.0", "at least 0"), *_NUMBER]
_SMOOTHING = [("negative", -0.1, "-0.1", "at least 0"), ("half", 0.5, "0.5", "below 0.5"), *_NUMBER]
_OPTIONS: dict[type, dict[str, list[tuple[str, Any, str, str]]]] = {
    DPOOptions: {
        "beta": _POSITIVE,
        "label_smoothing": [("large", 1.5, "1.5", "at most 1"), *_NUMBER],
        "f_divergence_type": [("unknown", "kl", "'kl'", "'reverse_kl'")],
        "f_alpha_divergence_coef": _NUMBER,
        "ld_alpha": [("large", 1.5, "1.5", "at most 1"), ("text", "x", "'x'", "or None")],
        "use_weighting": [("text", "yes", "'yes'", "True or False"), ("number", 1, "1", "True or False")],
        "discopop_tau": _POSITIVE,
        "loss_type": [
            ("unknown", "dpo", "'dpo'", "'sigmoid'"),
            ("unknown in a list", ("sigmoid", "kto_pair"), "'kto_pair'", "'sigmoid'"),
            ("empty", (), "()", "a name or a list of names"),
            ("number", 3, "3", "a name or a list of names"),
        ],
        "loss_weights": [("number", 1.0, "1.0", "a list of numbers"), ("many", (1.0, 2.0), "(1.0, 2.0)", "one weight")],
    },
    CPOOptions: {
        "beta": _POSITIVE,
        "loss_type": [("unknown", "dpo", "'dpo'", "'simpo'")],
        "cpo_alpha": _WEIGHT,
        "simpo_gamma": _NUMBER,
        "alpha": _NUMBER,
        "label_smoothing": _SMOOTHING,
    },
    ORPOOptions: {"beta": _POSITIVE},
    KTOOptions: {
        "beta": _POSITIVE,
        "loss_type": [("unknown", "sigmoid", "'sigmoid'", "'apo_zero_unpaired'")],
        "desirable_weight": _WEIGHT,
        "undesirable_weight": _WEIGHT,
    },
    TPOOptions: {
        "beta": _POSITIVE,
        "loss_type": [("unknown", "tpo", "'tpo'", "'tpo-l'")],
        "tpo_alpha": _WEIGHT,
        "tpo_l_gamma": _NUMBER,
        "label_smoothing": _SMOOTHING,
    },
}
_TOGETHER: list[tuple[str, type, dict[str, Any], tuple[str, ...]]] = [
    (
        "divergence",
        DPOOptions,
        {"loss_type": "nca_pair", "f_divergence_type": "forward_kl"},
        ("f_divergence_type", "'forward_kl'", "'reverse_kl' for loss types other than"),
    ),
    (
        "robust",
        DPOOptions,
        {"loss_type": "robust", "label_smoothing": 0.5},
        ("label_smoothing", "0.5", "below 0.5 for loss_type='robust'"),
    ),
    ("exo", DPOOptions, {"loss_type": "exo_pair"}, ("label_smoothing", "0.0", "above 0 and below 1")),
    (
        "dropped smoothing",
        DPOOptions,
        {"label_smoothing": 0.1},
        ("label_smoothing", "0.1", "0 for loss types other than"),
    ),
    (
        "weighted ranks",
        DPOOptions,
        {"loss_type": "aot", "use_weighting": True},
        ("use_weighting", "True", "False for aot"),
    ),
    (
        "dropped smoothing",
        CPOOptions,
        {"loss_type": "hinge", "label_smoothing": 0.1},
        ("label_smoothing", "0.1", "0 for loss_type='hinge'"),
    ),
    (
        "dropped smoothing",
        TPOOptions,
        {"loss_type": "ipo", "label_smoothing": 0.1},
        ("label_smoothing", "0.1", "0 for loss_type='ipo'"),
    ),
]
_V = torch.zeros(3)


def _pairs(**changed: Any) -> PairLogProbs:
    return PairLogProbs(_V, _V, _V, _V, _V, _V)._replace(**changed)


_KTO: dict[str, Any] = {"log_probs": _V, "ref_log_probs": _V, "labels": _V.bool(), "options": KTOOptions()}
_CALLS: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("dpo_loss-chosen-text", lambda: dpo_loss(_pairs(chosen="x"), DPOOptions()), ("pairs.chosen", "'x'", "floating")),
    (
        "dpo_loss-chosen-integers",
        lambda: dpo_loss(_pairs(chosen=_V.long()), DPOOptions()),
        ("pairs.chosen", "int64", "floating"),
    ),
    (
        "dpo_loss-chosen-matrix",
        lambda: dpo_loss(_pairs(chosen=torch.zeros(3, 2)), DPOOptions()),
        ("pairs.chosen", "(3, 2)", "a vector"),
    ),
    (
        "dpo_loss-rejected-length",
        lambda: dpo_loss(_pairs(rejected=torch.zeros(2)), DPOOptions()),
        ("pairs.rejected", "(2,)", "(3,)"),
    ),
    (
        "dpo_loss-num_chosen-number",
        lambda: dpo_loss(_pairs(num_chosen=3), DPOOptions()),
        ("pairs.num_chosen", "3", "a tensor"),
    ),
    (
        "dpo_loss-ref_chosen-missing",
        lambda: dpo_loss(_pairs(ref_chosen=None), DPOOptions()),
        ("pairs.ref_chosen", "None", "reference model"),
    ),
    (
        "dpo_loss-ref_rejected-meta",
        lambda: dpo_loss(_pairs(ref_rejected=_V.to("meta")), DPOOptions()),
        ("pairs.ref_rejected", "meta", "device"),
    ),
    (
        "dpo_loss-weight-missing",
        lambda: dpo_loss(_pairs(), DPOOptions(use_weighting=True)),
        ("pairs.weight", "None", "use_weighting=True"),
    ),
    ("tpo_loss-reference-missing", lambda: tpo_loss(_pairs(), None, TPOOptions()), ("reference", "None", "a tensor")),
    ("tpo_loss-reference-length", lambda: tpo_loss(_pairs(), _V[:2], TPOOptions()), ("reference", "(2,)", "(3,)")),
    ("kto_loss-log_probs-list", lambda: kto_loss(**_KTO | {"log_probs": [0.0]}), ("log_probs", "[0.0]", "floating")),
    ("kto_loss-log_probs-scalar", lambda: kto_loss(**_KTO | {"log_probs": _V[0]}), ("log_probs", "()", "a vector")),
    (
        "kto_loss-ref_log_probs-missing",
        lambda: kto_loss(**_KTO | {"ref_log_probs": None}),
        ("ref_log_probs", "None", "floating"),
    ),
    (
        "kto_loss-ref_log_probs-length",
        lambda: kto_loss(**_KTO | {"ref_log_probs": _V[:1]}),
        ("ref_log_probs", "(1,)", "(3,)"),
    ),
    ("kto_loss-labels-numbers", lambda: kto_loss(**_KTO | {"labels": _V}), ("labels", "float32", "torch.bool")),
    ("kto_loss-labels-length", lambda: kto_loss(**_KTO | {"labels": _V[:2].bool()}), ("labels", "(2,)", "(3,)")),
    ("sequence_sums-values-list", lambda: sequence_sums([1.0]), ("values", "[1.0]", "a tensor")),
    (
        "sequence_sums-sequence_ids-shape",
        lambda: sequence_sums(_V[None], _V.long(), 2),
        ("sequence_ids", "(3,)", "(1, 3)"),
    ),
    (
        "sequence_sums-num_sequences-missing",
        lambda: sequence_sums(_V[None], _V[None].long()),
        ("num_sequences", "None", "an integer"),
    ),
]


def _rows() -> Iterator[BadInput]:
    for options, of_options in _OPTIONS.items():
        for name, values in of_options.items():
            for kind, value, shown, expected in values:
                call = lambda options=options, name=name, value=value: options(**{name: value})  # noqa: E731
                yield BadInput(f"{options.__name__}-{name}-{kind}", call, (name, shown, expected))
    for kind, options, given, mentions in _TOGETHER:
        call = lambda options=options, given=given: options(**given)  # noqa: E731
        yield BadInput(f"{options.__name__}-together-{kind}", call, mentions)
    for identifier, function, mentions in _CALLS:
        yield BadInput(identifier, function, mentions)


BAD_INPUTS = list(_rows())
