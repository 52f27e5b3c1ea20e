"""``apply_liger_kernels``: what it takes, what it leaves, what survives copying, and the way back."""

import copy
import importlib
import json
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lightning_liger import AutoLigerModelForCausalLM, AutoLigerModelForImageTextToText, LazyLogits, apply_liger_kernels
from lightning_liger.patching import PatchEntry, PatchReport
from lightning_liger.patching.rules.base import Patched
from lightning_liger.patching.rules.head import HeadReplacement
from tests.lightning_liger.architectures import tiny_image_text_model
from tests.lightning_liger.tiny import VOCAB_SIZE, tiny_batch, tiny_llama

EXPECTED = {"rms_norm": 5, "rope": 2, "silu_mul": 2, "linear_cross_entropy": 1}
STRUCTURES = dict(zip(EXPECTED, ("LlamaRMSNorm", "LlamaAttention", "LlamaMLP", "Linear"), strict=True))


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def state(model: nn.Module) -> list[Any]:
    """What patching changes."""
    return [(type(each), list(each._forward_hooks), list(each._forward_pre_hooks)) for each in model.modules()]


def replaced(model: nn.Module) -> list[str]:
    return sorted(module.liger_replacement.kernel for module in model.modules() if isinstance(module, Patched))


def loss(model: nn.Module) -> Tensor:
    return model(**tiny_batch()).loss


def logits(model: nn.Module) -> LazyLogits | Tensor:
    return model(input_ids=tiny_batch()["input_ids"]).logits


@pytest.mark.parametrize(
    ("kernels", "missing"),
    [
        ("auto", []),
        (tuple(EXPECTED), []),
        *((kernel, [each for each in EXPECTED if each != kernel]) for kernel in EXPECTED),
        (["rope", "rope"], [each for each in EXPECTED if each != "rope"]),
        ({"rope": True, "rms_norm": None}, []),
        ({"linear_cross_entropy": {"chunk_bytes": 1 << 20}}, []),
        ({"rope": False, "rms_norm": False, "layer_norm": False, "silu_mul": True}, ["rope", "rms_norm"]),
    ],
    ids=str,
)
def test_chosen_kernels_are_applied_once_and_undone(kernels: Any, missing: Any) -> None:
    model = tiny_llama()
    before, want = state(model), loss(model)
    expected = {kernel: count for kernel, count in EXPECTED.items() if kernel not in missing}
    report = apply_liger_kernels(model, kernels)
    assert {entry.kernel: entry.count for entry in report.entries} == expected
    assert all(entry.structure == STRUCTURES[entry.kernel] and entry.replacement for entry in report.entries)
    assert report.num_replaced == sum(expected.values())
    assert replaced(model) == sorted(kernel for kernel, count in expected.items() for _ in range(count))
    assert isinstance(logits(model), LazyLogits) == ("linear_cross_entropy" in expected)
    patched = state(model)
    again = apply_liger_kernels(model, kernels)
    assert [(each.count, each.reason) for each in again.entries] == [
        (each.count, "already replaced") for each in report.entries
    ]
    again.undo()
    assert state(model) == patched
    torch.testing.assert_close(loss(model), want, rtol=1e-5, atol=0)
    for _ in range(2):
        report.undo()
        assert state(model) == before
        assert torch.equal(loss(model), want)


def test_options_of_the_loss_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = tiny_llama(), tiny_llama()
    row = VOCAB_SIZE * 4
    options = {"chunk_bytes": 3 * row, "accumulate_dtype": "float64", "saved_logits_bytes": 7 * row}
    report = apply_liger_kernels(model, {"linear_cross_entropy": options, "rms_norm": True, "rope": False})
    assert {entry.kernel for entry in report.entries} == {"linear_cross_entropy", "rms_norm", "silu_mul"}
    used: list[Any] = []
    module = importlib.import_module("liger_ops.loss.head_passes")
    driver = module.chunked_linear_loss
    monkeypatch.setattr(
        module, "chunked_linear_loss", lambda *args, **kwargs: (used.append(kwargs), driver(*args, **kwargs))[1]
    )
    torch.testing.assert_close(model(**tiny_batch()).loss, plain(**tiny_batch()).loss)
    assert [(call["chunk_size"], call["accumulate_dtype"]) for call in used] == [(3, torch.float64)]
    tokens_avoided = model.lm_head.fusion_counters.bytes_avoided // (4 * VOCAB_SIZE)
    assert tokens_avoided == tiny_batch()["labels"].numel() - 3
    logits = model(tiny_batch()["input_ids"]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tiny_batch()["labels"].flatten(), reduction="none")
    assert len(used[-1]["saved"].chunks) == 2


def pickled(model: nn.Module, protocol: int) -> nn.Module:
    return pickle.loads(pickle.dumps(model, protocol))


def test_head_of_another_class_stays_and_is_reported() -> None:
    model = tiny_llama()
    model.lm_head.__class__ = type("Scaled", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})
    with pytest.raises(ValueError, match=r"Scaled: the head is Scaled, not torch\.nn\.Linear"):
        apply_liger_kernels(model, ["linear_cross_entropy"])
    assert apply_liger_kernels(model).num_replaced == sum(EXPECTED.values()) - 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, *(partial(pickled, protocol=each) for each in (0, 5))])
def test_copy_of_a_patched_model_works_and_stays_patched(duplicate: Any) -> None:
    model = tiny_llama()
    report = apply_liger_kernels(model)
    loss(model)
    twin = duplicate(model)
    assert classes(twin) == classes(model)
    with torch.no_grad():
        assert isinstance(twin(**tiny_batch()).logits, LazyLogits)
    # Independent of each other: neither undoing nor training one reaches the other.
    report.undo()
    losses = loss(model), loss(twin)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    losses[1].backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(logits(twin), LazyLogits)
    assert twin.lm_head.fusion_counters is not getattr(model.lm_head, "fusion_counters", None)


def test_model_on_the_meta_device_is_patched_and_filled_later() -> None:
    reference = tiny_llama()
    with torch.device("meta"):
        model = tiny_llama()
        report = apply_liger_kernels(model)
    assert {entry.kernel: entry.count for entry in report.entries if entry.replacement} == EXPECTED
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(reference.state_dict())
    model.model.rotary_emb.inv_freq.copy_(reference.model.rotary_emb.inv_freq)  # not in the state dict
    assert isinstance(logits(model), LazyLogits)
    torch.testing.assert_close(loss(model), loss(reference), rtol=1e-5, atol=0)


def test_part_that_was_patched_before_is_hooked_once_and_stays_patched() -> None:
    owner = nn.ModuleDict({"policy": tiny_llama(), "reference": tiny_llama()})
    apply_liger_kernels(owner["policy"])
    report = apply_liger_kernels(owner)
    assert report.num_replaced == sum(EXPECTED.values())
    assert [len(model._forward_pre_hooks) for model in owner.values()] == [2, 2]
    report.undo()
    assert [len(model._forward_pre_hooks) for model in owner.values()] == [2, 0]
    assert [isinstance(logits(model), LazyLogits) for model in owner.values()] == [True, False]


class RaisingNorm(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.weight, self.eps, self.index = nn.Parameter(torch.ones(8)), 1e-6, index

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"reason {self.index}" + " because" * 50)


def test_model_in_which_nothing_was_replaced_is_a_warning_that_says_why() -> None:
    with pytest.warns(UserWarning, match="and 2 more reasons in the report") as warned:
        report = apply_liger_kernels(nn.ModuleList(map(RaisingNorm, range(5))))
    assert len({entry.reason for entry in report.entries}) == 5
    message = str(warned[0].message)
    assert [f"reason {index} because" in message for index in range(5)] == [True, True, True, False, False]
    assert message.count("1 RaisingNorm: ") == message.count("because ...") == 3
    with pytest.warns(UserWarning, match="in Sequential .no module looks like a norm, rotary embedding, gated MLP or"):
        assert apply_liger_kernels(nn.Sequential(nn.Linear(3, 4), nn.ReLU())).entries == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_liger_kernels(nn.ReLU(), "none")


def test_error_while_classes_are_exchanged_leaves_none_exchanged(monkeypatch):
    def fails(self, original):
        raise MemoryError

    monkeypatch.setattr(HeadReplacement, "patched_class", fails)  # the last module
    model = tiny_llama()
    with pytest.raises(MemoryError):
        apply_liger_kernels(model)
    assert replaced(model) == []


REPLACED = PatchEntry("LlamaRMSNorm", "rms_norm", 5, "rms_norm (llama casting)", 2.5e-7)
EXACT = PatchEntry("LlamaMLP", "silu_mul", 2, "silu_mul", 0.0)
KEPT = PatchEntry("LayerNorm", "rms_norm", 3, None, reason="is not of one weight vector")


def test_report_is_a_table_with_counts_errors_and_reasons_and_plain_data() -> None:
    report = PatchReport([REPLACED, EXACT, KEPT])
    lines = str(report).splitlines()
    assert "Module" in lines[2]
    rows = {cells[1]: cells[2:] for cells in (line.replace("│", " │ ").split() for line in lines) if len(cells) > 3}
    assert "5" in rows["LlamaRMSNorm"]
    assert "2e-07" in rows["LlamaRMSNorm"]
    assert "exact" in rows["LlamaMLP"]
    assert "(is" in rows["LayerNorm"]
    assert "exact" not in rows["LayerNorm"]
    assert max(map(len, lines)) <= 120
    rows = report.as_dict()
    assert (rows[0]["structure"], rows[0]["error"], rows[2]["replacement"]) == ("LlamaRMSNorm", 2.5e-7, None)
    assert json.loads(json.dumps(rows)) == rows
    assert "no module matches a chosen kernel" in str(PatchReport())


def test_pretrained_model_is_patched_and_computes_the_same(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    tiny_llama().save_pretrained(checkpoint)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = AutoLigerModelForCausalLM.from_pretrained(checkpoint)
    assert model.liger_report.num_replaced == 2 + 2 + 5 + 1
    batch = tiny_batch()
    torch.testing.assert_close(model(**batch).loss, plain(**batch).loss)
    assert model.get_output_embeddings().fusion_counters.num_losses == 1
    model.save_pretrained(checkpoint / "saved")
    saved = AutoModelForCausalLM.from_pretrained(checkpoint / "saved")
    assert saved.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(saved(**batch).loss, plain(**batch).loss)


def test_from_config_takes_the_auto_class_arguments() -> None:
    model = AutoLigerModelForCausalLM.from_config(tiny_llama().config, dtype=torch.bfloat16, kernels="none")
    assert model.dtype == torch.bfloat16
    assert model.liger_report.num_replaced == 0


def test_image_text_model_computes_its_text_loss_fused() -> None:
    model = AutoLigerModelForImageTextToText.from_config(tiny_image_text_model("qwen2_vl").config)
    assert model(**tiny_batch()).loss.isfinite()
    counters = model.get_output_embeddings().fusion_counters
    assert (counters.num_losses, counters.num_materialized) == (1, 0)
