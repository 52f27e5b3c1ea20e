"""Bad arguments of finished preference modules, options of the mixin, and batches for its steps."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_liger import (
    CPOOptions,
    DPOOptions,
    KTOOptions,
    LigerCPO,
    LigerDPO,
    LigerGRPO,
    LigerKTO,
    LigerORPO,
    LigerPreferenceMixin,
    LigerTPO,
    TPOOptions,
)
from lightning_liger.post_training.rows import read_rows
from tests.bad_inputs import BadInput
from tests.lightning_liger.post_training.preference_data import padded, sequences
from tests.lightning_liger.tiny import TINY_CONFIG, tiny_llama

_MODULES: list[tuple[type, str, Any, str, str]] = [
    (LigerDPO, "beta", 0, "0", "above 0"),
    (LigerDPO, "loss_type", "kto", "'kto'", "'sigmoid'"),
    (LigerDPO, "loss_type", ["sigmoid", "x"], "'x'", "'sigmoid'"),
    (LigerDPO, "loss_type", None, "None", "a name or a list of names"),
    (LigerDPO, "loss_weights", [1.0, 2.0], "[1.0, 2.0]", "one weight"),
    (LigerDPO, "label_smoothing", 0.1, "0.1", "0 for loss types other than"),
    (LigerDPO, "reference", "copy", "'copy'", "'adapters'"),
    (LigerDPO, "reference", "adapters", "'adapters'", "only with lora"),
    (LigerDPO, "precompute_ref_log_probs", "yes", "'yes'", "True or False"),
    (LigerDPO, "ref_log_probs_folder", 3, "3", "a path"),
    (LigerDPO, "disable_dropout", 0, "0", "True or False"),
    (LigerDPO, "lora", "r=2", "'r=2'", "a dict"),
    (LigerDPO, "lora", {"rank": 2}, "{'rank': 2}", "LoraConfig"),
    (LigerDPO, "learning_rate", -1.0, "-1.0", "at least 0"),
    (LigerDPO, "loss_normalization", "mean", "'mean'", "'micro_batch'"),
    (LigerCPO, "loss_type", "dpo", "'dpo'", "'simpo'"),
    (LigerCPO, "cpo_alpha", -1, "-1", "at least 0"),
    (LigerORPO, "beta", "0.1", "'0.1'", "a finite number"),
    (LigerORPO, "loss_type", "dft", "'dft'", "'nll'"),
    (LigerORPO, "precompute_ref_log_probs", True, "True", "False for a loss without a reference"),
    (LigerCPO, "reference", "model", "'model'", "'auto' for a loss without a reference"),
    (LigerTPO, "sync_ref_model", True, "True", "False for a loss without a reference"),
    (LigerGRPO, "reference", "columns", "'columns'", "'auto' for a loss without a reference"),
    (LigerDPO, "ref_log_probs_folder", "folder", "'folder'", "None without precompute_ref_log_probs=True"),
    (LigerTPO, "loss_type", "tpo", "'tpo'", "'tpo-l'"),
    (LigerKTO, "loss_type", "sigmoid", "'sigmoid'", "'kto'"),
    (LigerKTO, "desirable_weight", None, "None", "a finite number"),
]


class _Module(LigerPreferenceMixin, L.LightningModule):
    def __init__(self, loss: Any = None, **attributes: Any) -> None:
        self.preference_loss = DPOOptions() if loss is None else loss
        for name, value in attributes.items():
            setattr(self, name, value)
        super().__init__()


@functools.cache
def _model() -> Any:
    return tiny_llama()


def _step(loss: Any = None, drop: str = "", items: int = 4, reference: str = "auto", **changed: Any) -> Any:
    module = _Module(loss, reference=reference)
    module.model = _model()
    batch: dict[str, Any] = padded(sequences(items)) | changed
    batch.pop(drop, None)
    return module.training_step(batch, 0)


def _unused_model() -> None:
    module = _Module(CPOOptions())
    module.ref_model = _model()
    module.setup("fit")


_COLUMNS: dict[str, Tensor] = {"ref_chosen_logps": torch.zeros(2), "ref_rejected_logps": torch.zeros(2)}
_IDS = torch.zeros(4, 5, dtype=torch.int64)
_STEPS: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("no reference", _step, ("reference", "ref_model", "precompute_ref_log_probs")),
    ("no input_ids", lambda: _step(drop="input_ids", **_COLUMNS), ("input_ids", "completion_mask")),
    ("no completion_mask", lambda: _step(drop="completion_mask", **_COLUMNS), ("completion_mask", "input_ids")),
    ("odd rows", lambda: _step(items=3), ("batch", "3 sequences", "as many chosen and rejected")),
    ("no triples", lambda: _step(TPOOptions()), ("batch", "4 sequences", "chosen, rejected and reference")),
    ("floating ids", lambda: _step(CPOOptions(), input_ids=_IDS.float()), ("input_ids", "float32", "int64")),
    ("flat ids", lambda: _step(CPOOptions(), input_ids=_IDS[0]), ("input_ids", "(5,)", "[rows, seq_len]")),
    ("mask shape", lambda: _step(CPOOptions(), completion_mask=_IDS[:2]), ("completion_mask", "(2, 5)", "one value")),
    ("mask list", lambda: _step(CPOOptions(), completion_mask=[[1]]), ("completion_mask", "[[1]]", "a tensor")),
    (
        "one column",
        lambda: _step(ref_chosen_logps=torch.zeros(2)),
        ("ref_chosen_logps", "ref_rejected_logps", "all of"),
    ),
    (
        "column shape",
        lambda: _step(**_COLUMNS | {"ref_chosen_logps": torch.zeros(4)}),
        ("ref_chosen_logps", "(4,)", "(2,)"),
    ),
    ("columns asked for", lambda: _step(reference="columns"), ("ref_chosen_logps", "reference='columns'", "input_ids")),
    ("model asked for", lambda: _step(reference="model"), ("reference", "'model'", "ref_model")),
    ("no adapters", lambda: _step(reference="adapters"), ("reference", "'adapters'", "peft")),
    ("unused model", _unused_model, ("ref_model", "LlamaForCausalLM", "None for a loss without a reference")),
    ("no labels", lambda: _step(KTOOptions("bco"), ref_logps=torch.zeros(4)), ("label", "None", "a tensor")),
    ("labels shape", lambda: _step(KTOOptions("bco"), label=_IDS[:, :2]), ("label", "(4, 2)", "(4,)")),
    ("no list", lambda: _Module().training_step([1], 0), ("batch", "[1]", "a mapping")),
]


def _rows() -> Iterator[BadInput]:
    for index, (module, name, value, shown, expected) in enumerate(_MODULES):
        arguments = {"config": TINY_CONFIG, name: value}
        call = lambda module=module, arguments=arguments: module(**arguments)  # noqa: E731
        yield BadInput(f"{module.__name__}-{name}-{index}", call, (name, shown, expected))
    for identifier, function, mentions in _STEPS:
        yield BadInput(f"LigerPreferenceMixin-batch-{identifier}", function, mentions)
    yield BadInput("LigerPreferenceMixin-loss-text", lambda: _Module("dpo"), ("preference_loss", "'dpo'", "DPOOptions"))
    yield BadInput(
        "read_rows-num_sequences", lambda: read_rows({"input_ids": _IDS, "completion_mask": _IDS, "sequence_ids": _IDS,
                                                      "num_sequences": 0}), ("num_sequences", "0", "at least 1"),
    )  # fmt: skip


BAD_INPUTS = list(_rows())
