"""Settings of post-training modules that do not fit each other, and batches for their steps."""

from __future__ import annotations

import functools
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_liger import (
    CPOOptions,
    DistillationOptions,
    DPOOptions,
    KTOOptions,
    LigerDistillation,
    LigerDPO,
    LigerGRPO,
    LigerMedusa,
    LigerMultipleChoice,
    LigerORPO,
    MedusaHeads,
    PolicyOptions,
    TPOOptions,
    load_medusa_heads,
    save_medusa_heads,
    store_teacher_topk,
)
from lightning_liger.data import MultipleChoiceDataModule
from lightning_liger.post_training.rows import read_rows
from tests.bad_inputs import row
from tests.lightning_liger.post_training import completion_batches as completions
from tests.lightning_liger.post_training.completion_batches import Policy
from tests.lightning_liger.post_training.preference_data import padded, sequences
from tests.lightning_liger.post_training.test_distillation import Alone, Student, patched
from tests.lightning_liger.post_training.test_medusa import Medusa
from tests.lightning_liger.post_training.test_preference import Module as Preference
from tests.lightning_liger.tiny import TINY_CONFIG, tiny_batch, tiny_llama
from tests.valid_calls import model

ONE, INT64 = {"config": TINY_CONFIG}, torch.int64
IDS, LOG_PROBS = torch.zeros(2, 11, 3, dtype=INT64), torch.full((2, 11, 3), -2.0)
ROWS = torch.zeros(4, 5, dtype=INT64)
COLUMNS = {"ref_chosen_logps": torch.zeros(2), "ref_rejected_logps": torch.zeros(2)}
MODE = "distillation_mode"


def changed(batch: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (batch | changes).items() if value is not None}


def prefer(changes: dict[str, Any], items: int = 4, preference_loss: Any = DPOOptions(), **attributes: Any) -> Any:  # noqa: B008
    module = Preference(preference_loss, with_reference=False, **attributes)
    return module.training_step(changed(padded(sequences(items)), changes), 0)


def apart(changes: dict[str, Any], options: PolicyOptions = PolicyOptions(), **settings: Any) -> Any:  # noqa: B008
    """Two prompts of up to three tokens with completions of up to six."""
    batch = completions.apart(completions.sequences(2, columns=()))
    return Policy(options, **settings).step_loss("train", changed(batch, changes))


def joined(changes: dict[str, Any]) -> Any:
    batch = completions.joined(completions.sequences(2, columns=()))
    return Policy(PolicyOptions()).step_loss("train", changed(batch, changes))


@functools.cache
def student(mode: str) -> Student:
    return patched(Alone(distillation_mode=mode))


def distill(mode: str, changes: dict[str, Any]) -> Any:
    return student(mode).training_step({**tiny_batch(), **changes}, 0)


def choose(changes: dict[str, Any]) -> None:
    module = LigerMultipleChoice(config={"num_hidden_layers": 1})
    module.model = tiny_llama()
    ids = torch.ones(2, 4, dtype=INT64)
    batch = {"input_ids": ids, "completion_mask": ids, "question_ids": ids[0, :2], "is_answer": ids[0, :2] > 0}
    batch |= {"num_characters": ids[0, :2].float(), "num_questions": 1}
    module.validation_step({**batch, **changes}, 0)


def question(changes: dict[str, Any], tmp_path: Path) -> None:
    file, good = tmp_path / "a.jsonl", {"question": "a?", "choices": ["b", "c"], "answer": 1}
    file.write_text(json.dumps(good) + "\n" + json.dumps({**good, **changes}), encoding="utf-8")
    MultipleChoiceDataModule(path=file, cache_dir=tmp_path, vocab_size=300).prepare_data()


def unused_reference() -> None:
    Preference(CPOOptions()).ref_model = model()


def other_heads(tmp_path: Path) -> None:
    save_medusa_heads(MedusaHeads(8, 5, 1), tmp_path)
    load_medusa_heads(MedusaHeads(8, 5, 2), tmp_path)


def topk(ids: Any, log_probs: Any = LOG_PROBS) -> dict[str, Any]:
    return {"teacher_topk_ids": ids, "teacher_topk_log_probs": log_probs}


# Classes, their arguments, and what messages say.
MODULES: list[tuple[Any, ...]] = [
    (LigerDPO, {"loss_type": ["sigmoid", "x"]}, "loss_type", "'x'", "'sigmoid'"),
    (LigerDPO, {"reference": "adapters"}, "reference", "'adapters'", "only with lora"),
    (LigerDPO, {"ref_log_probs_folder": "x"}, "ref_log_probs_folder", "'x'", "precompute_ref_log_probs=True"),
    (LigerORPO, {"loss_type": "dft"}, "loss_type", "'dft'", "'nll'"),
    (LigerORPO, {"precompute_ref_log_probs": True}, "precompute_ref_log_probs", "False for a loss without a reference"),
    (LigerGRPO, {"reference": "columns"}, "reference", "'columns'", "'auto' for a loss without a reference"),
    (LigerDistillation, {"teacher_config": {"hidden_size": 8}}, "teacher_config", "teacher_model_type"),
    (LigerDistillation, {"teacher": "f", "teacher_model_type": "llama"}, "teacher_model_type", "'llama'", "folder"),
    (LigerDistillation, {"teacher_model_type": "no_such"}, "teacher_model_type", "'no_such'", "transformers knows"),
    (LigerMedusa, {"medusa_self_distillation": True}, "self_distillation", "True", "medusa_only_heads=True"),
    (LigerMedusa, {"lora": {"r": 4}}, "lora", "{'r': 4}", "medusa_only_heads=True"),
    (LigerMedusa, {"medusa_pretrained": "./no/such"}, "'./no/such'", "medusa_lm_head.safetensors"),
]
OPTIONS: list[tuple[Any, ...]] = [
    ({MODE: "topk_logits", "divergence": "cosine"}, "divergence", "'cosine'", "'jsd'"),
    ({MODE: "topk_logits", "beta": 0.3}, "beta", "0.3", "None with divergence='forward_kl'"),
    ({"divergence": "cosine", "beta": 0.5}, "beta", "0.5", "None with divergence='cosine'"),
    ({MODE: "uld", "beta": 0.5}, "beta", "0.5", "None with distillation_mode='uld'"),
    ({"support_mode": "zero"}, "support_mode", "'zero'", "'tail' with distillation_mode='full_logits'"),
    ({MODE: "sampled_token", "t_squared": True}, "t_squared", "True", "False with distillation_mode="),
]
PREFERENCES: list[tuple[Any, ...]] = [
    ({}, {}, "reference", "ref_model", "precompute_ref_log_probs"),
    ({"input_ids": None}, {}, "input_ids", "completion_mask"),
    ({}, {"items": 3}, "batch", "3 sequences", "as many chosen and rejected"),
    ({}, {"preference_loss": TPOOptions()}, "batch", "4 sequences", "chosen, rejected and reference"),
    ({"input_ids": ROWS.float()}, {"preference_loss": CPOOptions()}, "input_ids", "float32", "int64"),
    ({"input_ids": ROWS[0]}, {"preference_loss": CPOOptions()}, "input_ids", "(5,)", "[rows, seq_len]"),
    ({"completion_mask": ROWS[:2]}, {"preference_loss": CPOOptions()}, "completion_mask", "(2, 5)", "one value"),
    ({"completion_mask": [[1]]}, {"preference_loss": CPOOptions()}, "completion_mask", "[[1]]", "a tensor"),
    ({"ref_chosen_logps": torch.zeros(2)}, {}, "ref_chosen_logps", "ref_rejected_logps", "all of"),
    (COLUMNS | {"ref_chosen_logps": torch.zeros(4)}, {}, "ref_chosen_logps", "(4,)", "(2,)"),
    ({}, {"reference": "columns"}, "ref_chosen_logps", "reference='columns'", "input_ids"),
    ({"ref_logps": torch.zeros(4)}, {"preference_loss": KTOOptions("bco")}, "label", "None", "a tensor"),
    ({"label": ROWS[:, :2]}, {"preference_loss": KTOOptions("bco")}, "label", "(4, 2)", "(4,)"),
    ({}, {"preference_loss": "dpo"}, "preference_loss", "'dpo'", "DPOOptions"),
]
POLICIES: list[tuple[Any, ...]] = [
    ({"prompt_mask": None}, "batch", "'prompt_mask'", "prompt_ids"),
    ({"advantages": None}, "batch", "'advantages'", "prompt_ids"),
    ({"prompt_ids": [[1, 2]]}, "batch['prompt_ids']", "a tensor", "[[1, 2]]"),
    ({"prompt_ids": torch.ones(2, 3)}, "batch['prompt_ids']", "float32", "torch.int64"),
    ({"prompt_ids": torch.ones(3, dtype=INT64)}, "batch['prompt_ids']", "(3,)", "[num_sequences, length]"),
    ({"prompt_mask": torch.ones(2, 4)}, "batch['prompt_mask']", "(2, 4)", "(2, 3)"),
    ({"prompt_mask": torch.ones(2, 3, device="meta")}, "prompt_mask", "meta", "cpu"),
    ({"advantages": torch.zeros(3)}, "batch['advantages']", "(3,)", "(2,)"),
    ({"advantages": torch.zeros(2, 3)}, "batch['advantages']", "(2, 3)", "(2, 6)"),
    ({"advantages": torch.zeros(2).long()}, "batch['advantages']", "int64", "floating"),
    ({"tool_mask": torch.ones(2, 7)}, "batch['tool_mask']", "(2, 7)", "(2, 6)"),
    ({"old_per_token_logps": torch.zeros(2)}, "old_per_token_logps", "(2,)", "(2, 6)"),
    ({"ref_per_token_logps": torch.zeros(2, 6).long()}, "ref_per_token_logps", "int64", "floating"),
    ({"sampling_per_token_logps": torch.zeros(2, 6, device="meta")}, "sampling_per_token_logps", "meta", "cpu"),
    ({"completion_ids": ROWS[:3], "completion_mask": ROWS[:3], "tool_mask": None}, "(3, 5)", "2 prompts"),
]
SETTINGS: list[tuple[Any, ...]] = [
    ({"options": {"loss_type": "grpo"}}, "policy_options", "{'loss_type': 'grpo'}", "PolicyOptions"),
    ({"temperature": 0.0}, "temperature", "0.0", "above 0"),
    ({"loss_normalization": "mean"}, "loss_normalization", "'mean'"),
]
STUDENTS: list[tuple[Any, ...]] = [
    ("full_logits", {}, "needs a teacher", "'full_logits'", "None"),
    ("topk_logits", {"teacher_topk_ids": IDS}, "both", "teacher_topk_log_probs", "teacher_topk_ids"),
    ("topk_logits", topk(LOG_PROBS), "batch['teacher_topk_ids']", "int64", "torch.float32"),
    ("topk_logits", topk(IDS[:, 1:], LOG_PROBS[:, 1:]), "batch['teacher_topk_ids']", "(2, 11, 3)", "(2, 10, 3)"),
    ("topk_logits", topk(IDS, LOG_PROBS[..., :2]), "batch['teacher_topk_log_probs']", "(2, 11, 3)", "(2, 11, 2)"),
    ("sampled_token", {"teacher_per_token_logps": [0.0]}, "batch['teacher_per_token_logps']", "a tensor", "[0.0]"),
    ("full_logits", {"labels": None}, "batch", "'labels'", "input_ids"),
    ("full_logits", {"labels": None, "completion_mask": IDS[0]}, "completion_mask", "(2, 11)", "(11, 3)"),
    ("full_logits", {"atention_mask": IDS}, "'atention_mask'", "unknown", "attention_mask"),
]
PLACES = "a number from 0 to 1, or a letter from A to B"
QUESTIONS: list[tuple[Any, ...]] = [
    ({"question": None}, "'question' is null"),
    ({"choices": []}, "'choices'", "not empty"),
    ({"choices": ["b", 5]}, "'choices'", "2 to 26 strings"),
    ({"answer": 2}, "'answer'", PLACES, "2"),
    ({"answer": True}, "'answer'", PLACES, "True"),
    ({"answer": "C"}, "'answer'", PLACES, "'C'"),
]
HEADS: list[tuple[Any, ...]] = [
    (partial(MedusaHeads, 8, None, 2, 0), "num_layers", "0", "shared"),
    (partial(MedusaHeads.of, nn.Linear(2, 2)), "model", "Linear", "LM head"),
    (partial(save_medusa_heads, nn.ModuleList(), "x"), "heads", "MedusaHeads", "ModuleList"),
    (partial(save_medusa_heads, MedusaHeads(8, 5, 1, device="meta"), "x"), "heads", "whole tensors", "linear.weight"),
    (other_heads, "folder", "1.0.linear"),
    (partial(store_teacher_topk, model(), [tiny_batch()], "t.bin"), "path", "'t.bin'", ".safetensors"),
    (
        lambda tmp_path: store_teacher_topk(model(), ["text"], tmp_path / "t.safetensors"),
        "batch",
        "'text'",
        "a mapping",
    ),
]

BAD_INPUTS = [
    *(row(partial(cls, **ONE, **each), *mentions, error=(ValueError, OSError)) for cls, each, *mentions in MODULES),
    *(row(partial(DistillationOptions, **each), *mentions) for each, *mentions in OPTIONS),
    *(row(partial(prefer, each, **attributes), *mentions) for each, attributes, *mentions in PREFERENCES),
    *(row(partial(apart, each), *mentions) for each, *mentions in POLICIES),
    *(row(partial(Policy, **({"options": PolicyOptions()} | each)), *mentions) for each, *mentions in SETTINGS),
    *(row(partial(distill, mode, each), *mentions) for mode, each, *mentions in STUDENTS),
    *(row(partial(question, each), "a.jsonl, line 2", *mentions) for each, *mentions in QUESTIONS),
    *(row(call, *mentions, error=(TypeError, ValueError, OSError)) for call, *mentions in HEADS),
    row(partial(choose, {"question_ids": None}), "'question_ids'", "got"),
    row(partial(choose, {"num_questions": 0}), "num_questions", "at least 1", "0"),
    row(partial(choose, {"is_answer": torch.ones(3)}), "is_answer", "each choice", "3"),
    row(unused_reference, "ref_model", "LlamaForCausalLM", "None for a loss without a reference"),
    row(
        partial(read_rows, {"input_ids": ROWS, "completion_mask": ROWS, "sequence_ids": ROWS, "num_sequences": 0}),
        *("num_sequences", "0", "at least 1"),
    ),
    row(
        partial(joined, {"sequence_ids": torch.zeros(2, 7).long(), "num_sequences": 3}), "'advantages'", "(2,)", "(3,)"
    ),
    row(lambda: student("uld").training_step([1], 0), "batch", "[1]", "a mapping"),
    row(lambda: Policy(PolicyOptions()).step_loss("train", [1, 2]), "batch", "list", "'prompt_ids'"),
    row(lambda: apart({}, PolicyOptions(beta=0.1), reference="columns"), "ref_per_token_logps", "'columns'", "batch"),
    row(
        lambda: Medusa(tiny_llama()).training_step(tiny_batch(), 0),
        *("lazy logits", "apply_liger_kernels"),
        error=RuntimeError,
    ),
]
