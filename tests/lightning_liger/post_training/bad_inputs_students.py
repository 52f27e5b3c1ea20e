"""Bad arguments of distillation and of Medusa heads, and batches for their steps."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_liger import (
    DistillationOptions,
    LigerDistillation,
    LigerDistillationMixin,
    LigerMedusa,
    LigerMedusaMixin,
    MedusaHeads,
    apply_liger_kernels,
    load_medusa_heads,
    save_medusa_heads,
    store_teacher_topk,
    teacher_topk_rows,
)
from tests.bad_inputs import BadInput
from tests.lightning_liger.tiny import TINY_CONFIG, tiny_batch, tiny_llama

NUMBER, INTEGER, BOOL = "a finite number", "an integer", "True or False"

Cases = dict[str, list[tuple[Any, tuple[str, ...]]]]

_DISTILLATION: Cases = {
    "distillation_mode": [("logits", ("'logits'", "'topk_logits'")), (None, ("None", "'uld'"))],
    "divergence": [("kl", ("'kl'", "'forward_kl'"))],
    "beta": [(-0.1, ("-0.1", "at least 0")), ("0.5", ("'0.5'", NUMBER))],
    "teacher_temperature": [(0.0, ("0.0", "above 0"))],
    "t_squared": [(1, ("1", BOOL))],
    "vocab": [("pad", ("'pad'", "'common'"))],
    "support_mode": [("top", ("'top'", "'renormalize'"))],
    "distillation_topk": [(0, ("0", "at least 1")), (1.5, ("1.5", INTEGER))],
    "distillation_support": [("both", ("'both'", "'union'"))],
    "estimator": [("k4", ("'k4'", "'k3'"))],
    "distillation_is_clip": [(-1.0, ("-1.0", "above 0"))],
    "crossentropy_weight": [(-1.0, ("-1.0", "at least 0")), (None, ("None", NUMBER))],
    "distillation_weight": [(float("nan"), ("nan", NUMBER))],
    "log_entropy": [("no", ("'no'", BOOL))],
}
_OF_TEACHER: Cases = {
    "teacher": [(5, ("5", "a path")), ("", ("''", "not empty"))],
    "teacher_dtype": [("int8", ("'int8'", "'bfloat16'"))],
    "teacher_model_type": [("no_such_model", ("'no_such_model'", "transformers knows"))],
    "teacher_config": [({"hidden_size": 8}, ("{'hidden_size': 8}", "teacher_model_type"))],
    "shard_teacher": [("yes", ("'yes'", BOOL))],
    "distillation_temperature": [(0, ("temperature", "0", "above 0"))],
    "lora": [("r=4", ("'r=4'", "a dict"))],
}
_MEDUSA: Cases = {
    "medusa_num_heads": [(0, ("0", "at least 1")), (2.5, ("2.5", INTEGER)), (True, ("True", INTEGER))],
    "medusa_num_layers": [(-1, ("-1", "at least 0"))],
    "medusa_shared_head": [("yes", ("'yes'", BOOL))],
    "medusa_only_heads": [(1, ("1", BOOL))],
    "medusa_decay_coefficient": [(0, ("0", "above 0"))],
    "medusa_heads_coefficient": [(-0.2, ("-0.2", "at least 0"))],
    "medusa_scheduler": [("cosine", ("'cosine'", "'sine'"))],
    "medusa_scheduler_steps": [(0, ("0", "at least 1"))],
    "medusa_lr_multiplier": [(-1, ("-1", "at least 0"))],
    "medusa_warmup_steps": [(-1, ("-1", "at least 0"))],
    "medusa_self_distillation": [(True, ("True", "medusa_only_heads=True"))],
    "lora": [({"r": 4}, ("{'r': 4}", "medusa_only_heads=True"))],
    "medusa_pretrained": [("no/such/folder", ("'no/such/folder'", "medusa_lm_head.safetensors"))],
}
_HEADS: Cases = {
    "hidden_size": [(0, ("0", "at least 1"))],
    "vocab_size": [("131", ("'131'", INTEGER))],
    "num_heads": [(0, ("0", "at least 1"))],
    "num_layers": [(None, ("None", INTEGER))],
    "bias": [(0, ("0", BOOL))],
}


def _rows_of(function: Any, cases: Cases, **good: Any) -> Iterator[BadInput]:
    for name, values in cases.items():
        for case, (value, mentions) in enumerate(values):
            call = functools.partial(function, **{**good, name: value})
            key = "folder" if name == "medusa_pretrained" else name
            error = (TypeError, ValueError, FileNotFoundError)
            mentions = mentions if name == "distillation_temperature" else (key.removeprefix("medusa_"), *mentions)
            yield BadInput(f"{function.__name__}-{name}-{case}", call, mentions, error)


class _Student(LigerDistillationMixin, L.LightningModule):
    def __init__(self, **options: Any) -> None:
        self.distillation = DistillationOptions(**options)
        super().__init__()
        self.model = tiny_llama()


class _Medusa(LigerMedusaMixin, L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()
        self.medusa_heads = MedusaHeads.of(self.model, 1)


@functools.cache
def _student(mode: str) -> _Student:
    module = _Student(distillation_mode=mode)
    apply_liger_kernels(module, "linear_cross_entropy")
    return module


def _step(mode: str, changes: dict[str, Any]) -> Any:
    return _student(mode).training_step({**tiny_batch(), **changes}, 0)


IDS = torch.zeros(2, 11, 3, dtype=torch.int64)
LOG_PROBS = torch.full((2, 11, 3), -2.0)
_BATCHES: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
    ("teacher-missing", "full_logits", {}, ("needs a teacher", "'full_logits'", "None")),
    ("topk-no_teacher", "topk_logits", {}, ("needs a teacher", "'topk_logits'", "teacher_topk_ids")),
    ("topk-only_ids", "topk_logits", {"teacher_topk_ids": IDS}, ("both", "teacher_topk_log_probs", "teacher_topk_ids")),
    (
        "topk-float_ids",
        "topk_logits",
        {"teacher_topk_ids": LOG_PROBS, "teacher_topk_log_probs": LOG_PROBS},
        ("batch['teacher_topk_ids']", "int64", "torch.float32"),
    ),
    (
        "topk-short",
        "topk_logits",
        {"teacher_topk_ids": IDS[:, 1:], "teacher_topk_log_probs": LOG_PROBS[:, 1:]},
        ("batch['teacher_topk_ids']", "(2, 11, 3)", "(2, 10, 3)"),
    ),
    (
        "topk-other_k",
        "topk_logits",
        {"teacher_topk_ids": IDS, "teacher_topk_log_probs": LOG_PROBS[..., :2]},
        ("batch['teacher_topk_log_probs']", "(2, 11, 3)", "(2, 11, 2)"),
    ),
    (
        "sampled-list",
        "sampled_token",
        {"teacher_per_token_logps": [0.0]},
        ("batch['teacher_per_token_logps']", "a tensor", "[0.0]"),
    ),
    (
        "sampled-row",
        "sampled_token",
        {"teacher_per_token_logps": LOG_PROBS[0, :, 0]},
        ("batch['teacher_per_token_logps']", "(2, 11)", "(11,)"),
    ),
    ("labels-missing", "full_logits", {"labels": None}, ("batch", "'labels'", "input_ids")),
    (
        "mask-short",
        "full_logits",
        {"labels": None, "completion_mask": IDS[0]},
        ("completion_mask", "(2, 11)", "(11, 3)"),
    ),
    ("key-unknown", "full_logits", {"atention_mask": IDS}, ("'atention_mask'", "unknown", "attention_mask")),
]


def _wrong_heads(tmp_path: Path) -> None:
    save_medusa_heads(MedusaHeads(8, 5, 1), tmp_path)
    load_medusa_heads(MedusaHeads(8, 5, 2), tmp_path)


def _others() -> Iterator[BadInput]:
    for case, mode, changes, mentions in _BATCHES:
        yield BadInput(f"student-{case}", functools.partial(_step, mode, changes), mentions)
    yield BadInput("student-options", _wrong_options, ("distillation", "DistillationOptions", "{'beta': 1.0}"))
    yield BadInput(
        "LigerDistillation-two_teachers",
        lambda: LigerDistillation(teacher="folder", teacher_model_type="llama", config=TINY_CONFIG),
        ("teacher_model_type", "'llama'", "folder"),
    )
    for cls in (LigerDistillation, LigerMedusa):
        make = lambda cls=cls: cls(loss_type="dft", model_type="llama", config=TINY_CONFIG)  # noqa: E731
        yield BadInput(f"{cls.__name__}-loss_type", make, ("loss_type", "'dft'", "'nll'"))
    yield BadInput("MedusaHeads-shared", lambda: MedusaHeads(8, None, 2, 0), ("num_layers", "0", "shared"))
    yield BadInput("MedusaHeads.of-model", lambda: MedusaHeads.of(nn.Linear(2, 2)), ("model", "Linear", "LM head"))
    yield BadInput(
        "save_medusa_heads-heads",
        lambda: save_medusa_heads(nn.ModuleList(), "x"),
        ("heads", "MedusaHeads", "ModuleList"),
    )
    yield BadInput(
        "save_medusa_heads-meta",
        lambda: save_medusa_heads(MedusaHeads(8, 5, 1, device="meta"), "x"),
        ("heads", "whole tensors", "0.0.linear.weight"),
    )
    yield BadInput(
        "load_medusa_heads-folder",
        lambda: load_medusa_heads(MedusaHeads(8, 5, 1), "no/such"),
        ("medusa_lm_head.safetensors", "'no/such'"),
        FileNotFoundError,
    )
    yield BadInput("load_medusa_heads-others", _wrong_heads, ("folder", "1.0.linear"))
    yield BadInput(
        "medusa-unpatched",
        lambda: _Medusa().training_step(tiny_batch(), 0),
        ("lazy logits", "apply_liger_kernels"),
        RuntimeError,
    )
    cases: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        ("model", {"model": "tiny"}, ("model", "'tiny'", "a module")),
        ("top_k", {"top_k": 0}, ("top_k", "0", "at least 1")),
        ("temperature", {"temperature": -1}, ("temperature", "-1", "above 0")),
        ("num_samples", {"num_samples": 1.5}, ("num_samples", "1.5", INTEGER)),
        ("proposal", {"proposal_temperature": 0}, ("proposal_temperature", "0", "above 0")),
    ]
    for case, changes, mentions in cases:
        arguments: dict[str, Any] = {"model": nn.Linear(2, 2), "batches": [], **changes}
        yield BadInput(f"teacher_topk_rows-{case}", functools.partial(teacher_topk_rows, **arguments), mentions)
    yield BadInput(
        "store_teacher_topk-path",
        lambda: store_teacher_topk(tiny_llama(), [tiny_batch()], "teacher.bin"),
        ("path", "'teacher.bin'", ".safetensors"),
    )
    yield BadInput(
        "store_teacher_topk-batch",
        lambda tmp_path: store_teacher_topk(tiny_llama(), ["text"], tmp_path / "t.safetensors"),
        ("batch", "'text'", "a mapping"),
    )


_IGNORED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"distillation_mode": "topk_logits", "beta": 0.3}, ("beta", "None with divergence='forward_kl'")),
    ({"divergence": "cosine", "beta": 0.5}, ("beta", "None with divergence='cosine'")),
    ({"distillation_mode": "uld", "beta": 0.5}, ("beta", "None with distillation_mode='uld'")),
    ({"support_mode": "zero"}, ("support_mode", "'tail' with distillation_mode='full_logits'")),
    ({"distillation_mode": "sampled_token", "t_squared": True}, ("t_squared", "False with distillation_mode=")),
]


def _wrong_options() -> Any:
    class Wrong(LigerDistillationMixin, L.LightningModule):
        distillation = {"beta": 1.0}  # type: ignore[assignment]

    return Wrong()


BAD_INPUTS: list[BadInput] = [
    *_rows_of(DistillationOptions, _DISTILLATION),
    BadInput(
        "DistillationOptions-topk-divergence",
        lambda: DistillationOptions("topk_logits", "cosine"),
        ("divergence", "'cosine'", "'jsd'"),
    ),
    *(
        BadInput(
            f"DistillationOptions-ignored-{index}",
            lambda options=options: DistillationOptions(**options),
            (*mentions, repr(options[mentions[0]])),
        )
        for index, (options, mentions) in enumerate(_IGNORED)
    ),
    *_rows_of(LigerDistillation, _OF_TEACHER, config=TINY_CONFIG),
    *_rows_of(LigerMedusa, _MEDUSA, config=TINY_CONFIG),
    *_rows_of(MedusaHeads, _HEADS, **{"hidden_size": 8, "vocab_size": 5}),
    *_others(),
]
