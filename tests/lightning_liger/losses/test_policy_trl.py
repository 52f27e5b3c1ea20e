"""Policy-gradient losses, gradients and metrics beside those of TRL's trainers, driven without a model."""

import ast
import importlib.util
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_liger.losses.policy import num_items, sampling_ratio
from lightning_liger.losses.policy_batch import policy_objective
from lightning_liger.losses.policy_metrics import metric_kind, metric_names, policy_metrics
from lightning_liger.losses.policy_options import LOSS_TYPES, PolicyOptions
from tests.lightning_liger.losses.policy_batches import options_for, padded_batch

SPEC = importlib.util.find_spec("trl")
pytestmark = pytest.mark.skipif(SPEC is None, reason="needs the package trl")

RLOO, GRPO = ("trainer/rloo_trainer.py", "RLOOTrainer"), ("trainer/grpo_trainer.py", "GRPOTrainer")


def functions(file: str, class_name: str | None = None) -> dict[str, Any]:
    """The functions of a file of TRL, or the methods of a class in it, without its imports."""
    path = Path(SPEC.submodule_search_locations[0]) / file
    body: list[Any] = ast.parse(path.read_text()).body
    if class_name is not None:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name).body
    wanted = {"_compute_loss", "get_off_policy_mask", "get_gamma_weights", "get_high_entropy_mask", "nanmin", "nanmax"}
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    names: dict[str, Any] = {"torch": torch, "math": math}
    if class_name is not None:
        names |= functions("trainer/utils.py")
    exec(compile(ast.Module(found, []), str(path), "exec"), names)
    return {node.name: names[node.name] for node in found}


def trl_loss(
    log_probs: Tensor, entropies: Tensor, options: PolicyOptions, inputs: dict[str, Any]
) -> tuple[Tensor, dict[str, float]]:
    """TRL's loss and metrics of a micro-batch that is a whole optimizer step of one process."""
    methods = functions(*GRPO)
    if options.loss_type == "rloo":
        methods |= functions(*RLOO)
    accelerator = SimpleNamespace(num_processes=1, sync_gradients=True, reduce=lambda x, reduction: x)
    accelerator.gather = lambda x: x.reshape(-1) if x.ndim == 0 else x
    accelerator.pad_across_processes = lambda x, dim, pad_index: x
    settings = {name: getattr(options, name) for name in options.__dataclass_fields__}
    trainer = SimpleNamespace(
        **settings,
        args=SimpleNamespace(**settings, steps_per_generation=1),
        accelerator=accelerator,
        current_gradient_accumulation_steps=1,
        use_vllm="importance_sampling_ratio" in inputs,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _entropy_bonus_enabled=options.entropy_coef > 0,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (log_probs, entropies, None),
    )
    trainer.epsilon_high = options.bound_high
    for name, method in methods.items():
        is_static = name in ("get_off_policy_mask", "get_gamma_weights")
        setattr(trainer, name, method.__func__ if isinstance(method, staticmethod) else method)
        if not is_static:
            setattr(trainer, name, method.__get__(trainer))
    loss = trainer._compute_loss(None, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *[(loss_type, {}, {}) for loss_type in LOSS_TYPES],
    ("dapo", {}, {"old": False}),
    ("grpo", {"beta": 0.2, "importance_sampling_level": "sequence"}, {"ref": True}),
    ("luspo", {"beta": 0.2, "importance_sampling_level": "sequence"}, {"ref": True}),
    ("dapo", {"beta": 0.2, "delta": 1.2}, {"ref": True}),
    ("dapo", {"beta": 0.2, "use_bias_correction_kl": False}, {"ref": True}),
    ("sapo", {"importance_sampling_level": "sequence"}, {"per_token": True}),
    ("grpo", {"off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.6}, {"sampled": True}),
    ("dapo", {"entropy_coef": 0.3, "top_entropy_quantile": 0.5}, {}),
    ("dapo", {}, {"sampled": True}),
    ("vespo", {}, {"sampled": True}),
    ("cispo", {"vllm_importance_sampling_mode": "token_mask", "beta": 0.1}, {"sampled": True, "ref": True}),
    ("grpo", {}, {"per_token": True}),
]


@pytest.mark.parametrize(("loss_type", "changes", "kinds"), CASES)
def test_loss_gradient_and_metrics_are_trls(loss_type: str, changes: dict[str, Any], kinds: dict[str, Any]) -> None:
    options = options_for(loss_type, **changes)
    values, entropy_values, batch = padded_batch(**kinds)
    mask = batch.completions.mask
    inputs: dict[str, Any] = dict.fromkeys(("prompt_ids", "prompt_mask"), mask[:, :0].long())
    inputs |= dict.fromkeys(("completion_ids", "completion_mask"), mask.long())
    inputs |= {"advantages": batch.advantages, "num_items_in_batch": mask.sum()}
    for name, column in zip(("old", "ref", "sampling"), batch[2:], strict=True):
        if column is not None:
            inputs[f"{name}_per_token_logps"] = column.nan_to_num(nan=0.0)
    if loss_type == "rloo":
        inputs["old_logps"] = inputs["old_per_token_logps"].sum(1)
    if batch.sampling_log_probs is not None:
        ratio = sampling_ratio(batch.old_log_probs, batch.sampling_log_probs, options, batch.completions)
        inputs["importance_sampling_ratio"] = ratio[:, None] if ratio.ndim == 1 else ratio
    theirs, their_entropies = (x.nan_to_num(nan=0.0).requires_grad_() for x in (values, entropy_values))
    expected, expected_metrics = trl_loss(theirs, their_entropies, options, inputs)
    expected.backward()

    ours, entropies = values.clone().requires_grad_(), entropy_values.clone().requires_grad_()
    result = policy_objective(ours, entropies, batch, options)
    loss = result.total / num_items(batch.completions, options)
    if options.entropy_coef > 0:
        kept = mask.sum() * options.top_entropy_quantile
        loss = loss - options.entropy_coef * result.entropy / kept
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-9)
    if options.entropy_coef > 0:
        torch.testing.assert_close(entropies.grad, their_entropies.grad, rtol=1e-6, atol=1e-9)

    found = policy_metrics(entropies, batch, result, options)
    both = {name: value[0] / value[1] if isinstance(value, tuple) else value for name, value in found.items()}
    assert set(metric_names(options)) == {name for name in both if not name.startswith("sampling/")}
    assert all(isinstance(value, tuple) == (metric_kind(name) == "mean") for name, value in found.items())
    compared = expected_metrics.keys() - {"policy_loss", "entropy_coef"}
    assert compared <= both.keys()
    for name in compared:
        torch.testing.assert_close(float(both[name]), expected_metrics[name], rtol=1e-6, atol=1e-9, msg=f"{name}")
