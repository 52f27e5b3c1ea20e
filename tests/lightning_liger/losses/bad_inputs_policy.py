"""Bad options of policy-gradient losses, and tensors that do not fit them."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_liger.losses.advantages import group_advantages, leave_one_out_advantages
from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy_batch import PolicyBatch, check_policy_batch
from lightning_liger.losses.policy_options import PolicyOptions
from lightning_liger.losses.policy_weights import sampling_ratio, top_entropy_mask
from tests.bad_inputs import BadInput

NUMBER = "a finite number"
_AT_LEAST_0 = [("negative", -0.1, "-0.1"), ("nan", math.nan, "nan"), ("text", "1", "'1'"), ("bool", True, "True")]
_ABOVE_0 = [("zero", 0, "0"), *_AT_LEAST_0]
_BOOL = [("number", 1, "1"), ("text", "no", "'no'"), ("none", None, "None")]
_OPTIONS: dict[str, list[tuple[str, Any, str]]] = {
    "loss_type": [("unknown", "ppo2", "'ppo2'"), ("none", None, "None"), ("list", ["grpo"], "['grpo']")],
    "importance_sampling_level": [("unknown", "sentence", "'sentence'"), ("bool", True, "True")],
    "vllm_importance_sampling_mode": [("unknown", "clip", "'clip'"), ("none", None, "None")],
    "beta": [*_AT_LEAST_0, ("none", None, "None"), ("tensor", torch.tensor(0.1), "a tensor of shape ()")],
    "epsilon": _ABOVE_0,
    "epsilon_high": _ABOVE_0,
    "delta": [*_ABOVE_0, ("low", 1.1, "1.1")],
    "top_entropy_quantile": [*_ABOVE_0, ("large", 1.5, "1.5")],
    "entropy_coef": _AT_LEAST_0,
    "off_policy_mask_threshold": [("nan", math.nan, "nan"), ("text", "low", "'low'")],
    "vllm_importance_sampling_clip_max": _AT_LEAST_0,
    "vllm_importance_sampling_clip_min": [*_AT_LEAST_0, ("above max", 3.0, "3.0")],
    "sapo_temperature_pos": _ABOVE_0,
    "sapo_temperature_neg": _ABOVE_0,
    "vespo_k_pos": _AT_LEAST_0,
    "vespo_lambda_pos": _AT_LEAST_0,
    "vespo_k_neg": _AT_LEAST_0,
    "vespo_lambda_neg": _AT_LEAST_0,
    "max_completion_length": [("zero", 0, "0"), ("fraction", 1.5, "1.5"), ("text", "9", "'9'")],
    "use_bias_correction_kl": _BOOL,
    "vllm_importance_sampling_correction": _BOOL,
}
_COMBINATIONS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("cispo without bound", {"loss_type": "cispo"}, ("epsilon_high", "None", "5.0")),
    ("dr_grpo without length", {"loss_type": "dr_grpo"}, ("max_completion_length", "None", "'dr_grpo'")),
    ("delta of sapo", {"loss_type": "sapo", "delta": 4.0}, ("delta", "4.0", "'sapo'")),
    ("vespo of sequences", {"loss_type": "vespo", "importance_sampling_level": "sequence"}, ("'token'", "'sequence'")),
    ("rloo with divergence", {"loss_type": "rloo", "beta": 0.05}, ("beta", "0.05", "reward")),
    ("rloo with entropy mask", {"loss_type": "rloo", "top_entropy_quantile": 0.2}, ("top_entropy_quantile", "0.2")),
    (
        "truncate without bounds",
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
        ("vllm_importance_sampling_clip_max", "None", "'token_truncate'"),
    ),
]

SHAPE = (2, 3)
_TOKENS = torch.zeros(SHAPE)


def _batch(completions: Completions | None = None, **changes: Any) -> PolicyBatch:
    completions = completions or Completions(torch.ones(SHAPE, dtype=torch.bool))
    return PolicyBatch(completions, torch.zeros(2), _TOKENS)._replace(**changes)


def _check(options: dict[str, Any] | None = None, **changes: Any) -> Callable[[], Any]:
    return lambda: check_policy_batch(_batch(**changes), PolicyOptions(**(options or {})))


def _rows() -> Iterator[BadInput]:
    for name, values in _OPTIONS.items():
        for kind, value, text in values:
            yield BadInput(f"options-{name}-{kind}", functools.partial(PolicyOptions, **{name: value}), (name, text))
    for kind, options, mentions in _COMBINATIONS:
        yield BadInput(f"options-{kind}", functools.partial(PolicyOptions, **options), mentions)
    shape = "a tensor of shape (2, 4)"
    for name in ("old_log_probs", "ref_log_probs", "sampling_log_probs"):
        yield BadInput(f"batch-{name}-shape", _check(**{name: torch.zeros(2, 4)}), (name, shape, "(2, 3)"))
        yield BadInput(f"batch-{name}-integers", _check(**{name: _TOKENS.long()}), (name, "int64", "floating"))
        yield BadInput(f"batch-{name}-list", _check(**{name: [1.0]}), (name, "[1.0]", "tensor"))
        yield BadInput(f"batch-{name}-device", _check(**{name: _TOKENS.to("meta")}), (name, "meta", "cpu"))
    yield BadInput("batch-advantages-shape", _check(advantages=torch.zeros(3)), ("advantages", "(3,)", "(2, 3)"))
    yield BadInput("batch-advantages-none", _check(advantages=None), ("advantages", "None", "tensor"))
    yield BadInput(
        "batch-advantages-of tokens",
        _check({"loss_type": "rloo"}, advantages=_TOKENS),
        ("advantages", "(2, 3)", "[num_sequences]"),
    )
    yield BadInput("batch-ref_log_probs-missing", _check({"beta": 0.1}), ("ref_log_probs", "None", "beta=0.1"))
    sampled = {"sampling_log_probs": _TOKENS}
    for loss_type, mode in (("vespo", "sequence_mask"), ("rloo", "token_mask")):
        options = {"loss_type": loss_type, "vllm_importance_sampling_mode": mode}
        yield BadInput(
            f"batch-mode-{loss_type}",
            _check(options, **sampled),
            ("vllm_importance_sampling_mode", repr(mode), loss_type),
        )
    mask = torch.ones(SHAPE, dtype=torch.bool)
    ids = torch.zeros(SHAPE, dtype=torch.int64)
    for kind, arguments, mentions in (
        ("mask-float", (_TOKENS,), ("mask", "float32", "torch.bool")),
        ("mask-list", ([[True]],), ("mask", "[[True]]", "tensor")),
        ("mask-flat", (mask[0],), ("mask", "(3,)", "[num_rows, seq_len]")),
        ("sequence_ids-int32", (mask, ids.int(), 1), ("sequence_ids", "int32", "int64")),
        ("sequence_ids-shape", (mask, ids[:1], 1), ("sequence_ids", "(1, 3)", "(2, 3)")),
        ("sequence_ids-device", (mask, ids.to("meta"), 1), ("sequence_ids", "meta", "cpu")),
        ("num_sequences-missing", (mask, ids), ("num_sequences", "None", "an integer")),
        ("num_sequences-zero", (mask, ids, 0), ("num_sequences", "0", "at least 1")),
    ):
        yield BadInput(f"completions-{kind}", functools.partial(Completions, *arguments), mentions)
    yield BadInput(
        "sampling_ratio-mode", lambda: sampling_ratio(_TOKENS, _TOKENS, mode="clip"), ("mode", "'clip'", "'token_mask'")
    )
    yield BadInput(
        "sampling_ratio-completions",
        lambda: sampling_ratio(_TOKENS, _TOKENS, mode="sequence_mask"),
        ("completions", "None", "'sequence_mask'"),
    )
    yield BadInput(
        "sampling_ratio-clip_max",
        lambda: sampling_ratio(_TOKENS, _TOKENS, clip_max=-1.0),
        ("clip_max", "-1.0", "at least 0"),
    )
    yield BadInput(
        "top_entropy_mask-quantile",
        lambda: top_entropy_mask(_TOKENS, mask, quantile=0.0),
        ("quantile", "0.0", "above 0"),
    )
    rewards = torch.zeros(6)
    for function in (group_advantages, leave_one_out_advantages):
        for kind, arguments, mentions in (
            ("rewards-groups", (rewards, 4), ("rewards", "(6,)", "num_generations=4")),
            ("rewards-integers", (rewards.long(), 3), ("rewards", "int64", "floating")),
            ("rewards-ndim", (rewards.view(1, 2, 3), 1), ("rewards", "(1, 2, 3)", "[num_completions]")),
            ("num_generations-zero", (rewards, 0), ("num_generations", "0", "at least 1")),
            ("num_generations-text", (rewards, "2"), ("num_generations", "'2'", "an integer")),
        ):
            yield BadInput(f"{function.__name__}-{kind}", functools.partial(function, *arguments), mentions)
        yield BadInput(
            f"{function.__name__}-reward_weights-shape",
            functools.partial(function, rewards, 3, reward_weights=torch.ones(2)),
            ("reward_weights", "(2,)", "(1,)"),
        )
    for name, value in (("scale_rewards", "std"), ("multi_objective_aggregation", "sum")):
        call = functools.partial(group_advantages, rewards, 3, **{name: value})
        yield BadInput(f"group_advantages-{name}-unknown", call, (name, repr(value), "one of"))
    leave_one_out = functools.partial(leave_one_out_advantages, rewards, 3)
    for kind, settings, mentions in (
        ("kl-shape", {"kl": torch.zeros(3)}, ("kl", "(3,)", "(6,)")),
        ("beta-negative", {"beta": -1.0}, ("beta", "-1.0", "at least 0")),
        ("reward_clip_range-order", {"reward_clip_range": (2.0, 1.0)}, ("reward_clip_range[1]", "1.0", "at least 2.0")),
        ("normalize_advantages-number", {"normalize_advantages": 1}, ("normalize_advantages", "1", "True or False")),
    ):
        yield BadInput(f"leave_one_out_advantages-{kind}", functools.partial(leave_one_out, **settings), mentions)


BAD_INPUTS = list(_rows())
