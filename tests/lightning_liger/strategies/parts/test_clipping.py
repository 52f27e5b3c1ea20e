"""Gradients are clipped as those of one process, by their norm over all ranks, under every engine."""

import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger import LigerPrecisionPlugin, LigerSingleDeviceStrategy, LigerStrategy
from tests.lightning_liger.strategies.workers.clipping import (
    BROKEN_BATCH,
    CLIPPING,
    CLIPPING_OF_ENGINES,
    ENGINES,
    MAX_NORM,
    MAX_VALUE,
    MODELS,
    MODELS_OF_ENGINES,
    NUM_BATCHES,
    SHARDING,
    ClippedLM,
    make_scaled_batches,
    whole_batches,
    whole_parameters,
)
from tests.lightning_liger.strategies.workers.distributed import (
    NUM_RANKS,
    Batch,
    build_model,
    launch,
    make_optimizer,
    make_trainer,
    outside_loss,
    squared_gradient_norm,
)

RELATIVE_TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}
WAYS = [
    *(pytest.param(sharding, "untied", id=sharding) for sharding in SHARDING),
    *(pytest.param(name, name, id=name) for name in MODELS),
    pytest.param("accumulated", "accumulated", id="accumulated"),
    pytest.param("roots", "untied", id="several-roots"),
    *(
        pytest.param(f"{engine}-{name}", name, id=f"{engine}-{name}")
        for engine in ENGINES
        for name in (*MODELS_OF_ENGINES, "accumulated")
    ),
]
PREFIXES = ["", *(f"{engine}-" for engine in ENGINES)]
"""Of results; those of FSDP have none."""
ONE_PROCESS = ["liger", "liger_ddp", "liger_fsdp", "liger_model_parallel"]

under_each = pytest.mark.parametrize("prefix", PREFIXES, ids=["fsdp", *ENGINES])
broken_under_each = pytest.mark.parametrize(
    ("prefix", "clipping"),
    [(prefix, clipping) for prefix in PREFIXES for clipping in (CLIPPING_OF_ENGINES if prefix else CLIPPING)],
)


class PlainLM(ClippedLM):
    """Notes the norm itself, as Lightning's own clipping logs none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norms_before: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms_before.append(squared_gradient_norm(self.optimized_parameters()) ** 0.5)


def train_plainly(batches: list[Batch], module: dict[str, Any] | None = None, **options: Any) -> PlainLM:
    """One process, Lightning's own strategy, stock model."""
    lm = PlainLM(**(module or {}))
    make_trainer(root=None, **options).fit(lm, DataLoader(batches, batch_size=None))
    return lm


def assert_same_parameters(found: dict[str, Tensor], model: torch.nn.Module, rtol: float) -> None:
    expected = whole_parameters(model)
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        if "unused" not in name:  # FSDP gives these gradients of zeros, with which AdamW lets them decay
            # AdamW multiplies rounding differences of small gradients; a step moves a parameter by up to 3e-3.
            torch.testing.assert_close(parameter, expected[name], rtol=rtol, atol=10 * rtol)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request, tmp_path_factory) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return request.param, launch(request.param, folder, worker="tests.lightning_liger.strategies.workers.clipping")


# Two processes


@pytest.mark.parametrize(("way", "model"), WAYS)
def test_two_ranks_clip_by_the_norm_of_one_process_with_the_whole_batch(ranks, way, model):
    device, results = ranks
    accumulated = {"accumulate_grad_batches": 2} if model == "accumulated" else {}
    reference = train_plainly(whole_batches(), MODELS.get(model), **CLIPPING["norm"], **accumulated)
    rtol = RELATIVE_TOLERANCE[device]
    assert min(reference.norms_before) > MAX_NORM
    assert len(reference.norms_before) == NUM_BATCHES // (2 if accumulated else 1)
    for run in (result[way] for result in results):
        assert run["error"] is None
        torch.testing.assert_close(run["norms"], reference.norms_before, rtol=rtol, atol=0.0)
        assert_same_parameters(run["whole"], reference, rtol)
    # AdamW hardly notices the scale of gradients. Without sharding, each rank holds all of them.
    whole = way == "NO_SHARD" or way.startswith("ddp")
    parts = [result[way]["local_squared_norms"] for result in results][: 1 if whole else NUM_RANKS]
    clipped = [math.sqrt(sum(squares)) for squares in zip(*parts, strict=True)]
    torch.testing.assert_close(clipped, [MAX_NORM] * len(reference.norms_before), rtol=10 * rtol, atol=0.0)


@under_each
def test_two_ranks_clip_by_value_as_one_process(ranks, prefix):
    device, results = ranks
    reference = train_plainly(whole_batches(), **CLIPPING["value"])
    runs = [result[f"{prefix}value"] for result in results]
    for run in runs:
        assert_same_parameters(run["whole"], reference, RELATIVE_TOLERANCE[device])
        assert all(math.isnan(norm) for norm in run["norms"])  # nothing logged
    largest = [max(steps) for steps in zip(*(run["largest_gradients"] for run in runs), strict=True)]
    assert largest == pytest.approx([MAX_VALUE] * NUM_BATCHES)


@pytest.mark.parametrize(
    ("way", "clipping"),
    [("fabric", "norm"), ("fabric-flat", "norm"), ("fabric-roots", "norm"), ("fabric-value", "value")],
)
def test_two_ranks_with_fabric_clip_as_one_process(ranks, way, clipping):
    device, results = ranks
    reference = train_plainly(whole_batches(), **CLIPPING[clipping])
    rtol = RELATIVE_TOLERANCE[device]
    for run in (result[way] for result in results):
        if clipping == "norm":
            torch.testing.assert_close(run["norms"], reference.norms_before, rtol=rtol, atol=0.0)
        assert_same_parameters(run["whole"], reference.model, rtol)


def test_norm_of_mixed_float16_is_of_unscaled_gradients(ranks):
    reference = train_plainly(whole_batches(), **CLIPPING["norm"])
    for result in ranks[1]:
        # Losses were multiplied by 64 where there is a GPU; float16 keeps 11 bits.
        torch.testing.assert_close(result["16-mixed"]["norms"], reference.norms_before, rtol=1e-2, atol=0.0)


def test_parameters_in_no_unit_are_an_error_that_names_one(ranks):
    for result in ranks[1]:
        assert result["outside"]["error"].startswith("ValueError: clipping by norm needs every trained parameter in an")
        assert "1 of 21 are in none, such as 'model.lm_head.weight' of shape (97, 33)" in result["outside"]["error"]


@broken_under_each
def test_gradients_that_are_not_finite_raise_on_every_rank(ranks, prefix, clipping):
    for run in (result[f"{prefix}raise-{clipping}"] for result in ranks[1]):
        assert run["error"] == ("RuntimeError: on_nonfinite_grad='raise': the norm of the gradients is nan, not finite")
        assert len(run["norms"]) == BROKEN_BATCH


@broken_under_each
def test_skipped_step_leaves_training_as_if_it_had_not_been(ranks, prefix, clipping):
    device, results = ranks
    batches = whole_batches()
    del batches[BROKEN_BATCH]
    reference = train_plainly(batches, **CLIPPING[clipping])
    rtol = RELATIVE_TOLERANCE[device]
    for run in (result[f"{prefix}skip-{clipping}"] for result in results):
        assert run["error"] is None
        assert math.isnan(run["norms"].pop(BROKEN_BATCH))
        torch.testing.assert_close(run["norms"], reference.norms_before, rtol=rtol, atol=0.0)
        assert_same_parameters(run["whole"], reference, rtol)


@broken_under_each
def test_ignored_gradients_that_are_not_finite_reach_the_parameters(ranks, prefix, clipping):
    for run in (result[f"{prefix}ignore-{clipping}"] for result in ranks[1]):
        assert run["error"] is None
        assert run["whole"]["lm_head.weight"].isnan().any()


def test_fabric_raises_on_every_rank_unless_told_otherwise(ranks):
    for result in ranks[1]:
        errors = result["fabric-raise"]["errors"]
        assert errors.pop(BROKEN_BATCH) == (
            "RuntimeError: error_if_nonfinite=True: the norm of the gradients is nan, not finite"
        )
        assert errors == [None] * (NUM_BATCHES - 1)
        assert result["fabric-ignore"]["errors"] == [None] * NUM_BATCHES
        assert math.isnan(result["fabric-ignore"]["norms"][BROKEN_BATCH])


# One process


@pytest.mark.parametrize("name", ONE_PROCESS)
@pytest.mark.parametrize("clipping", ["norm", "value"])
def test_one_process_clips_as_lightning_does(name, clipping):
    lm = ClippedLM()
    trainer = make_trainer(root=None, strategy=name, **CLIPPING[clipping])
    trainer.fit(lm, DataLoader(whole_batches(), batch_size=None))
    reference = train_plainly(whole_batches(), **CLIPPING[clipping])
    if clipping == "norm":
        torch.testing.assert_close(lm.norms, reference.norms_before, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(lm.local_squared_norms, reference.local_squared_norms, rtol=1e-5, atol=0.0)
    assert_same_parameters(whole_parameters(trainer.strategy.model), reference, 1e-5)


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
def test_one_device_acts_on_gradients_that_are_not_finite(policy):
    batches = make_scaled_batches(1, broken=True)
    lm, strategy = ClippedLM(), LigerSingleDeviceStrategy(on_nonfinite_grad=policy)
    trainer = make_trainer(root=None, strategy=strategy)
    if policy == "raise":
        with pytest.raises(RuntimeError, match="on_nonfinite_grad='raise': the norm of the gradients is nan"):
            trainer.fit(lm, DataLoader(batches, batch_size=None))
        return
    trainer.fit(lm, DataLoader(batches, batch_size=None))
    if policy == "ignore":
        assert lm.model.lm_head.weight.isnan().any()
        return
    del batches[BROKEN_BATCH]
    reference = train_plainly(batches)
    assert math.isnan(lm.norms.pop(BROKEN_BATCH))
    torch.testing.assert_close(lm.norms, reference.norms_before, rtol=1e-5, atol=0.0)
    assert_same_parameters(whole_parameters(lm), reference, 1e-5)


def test_plugin_that_several_trainers_share_does_as_the_strategy_of_each_says():
    plugin = MixedPrecision("bf16-mixed", "cpu")
    strategies = {policy: LigerSingleDeviceStrategy(on_nonfinite_grad=policy) for policy in ("ignore", "skip")}
    trainers = {
        policy: make_trainer(root=None, strategy=strategy, plugins=[plugin], **CLIPPING["norm"])
        for policy, strategy in strategies.items()
    }
    for policy, trainer in trainers.items():
        lm = ClippedLM()
        trainer.fit(lm, DataLoader(make_scaled_batches(1, broken=True), batch_size=None))
        assert trainer.precision_plugin is plugin
        assert lm.model.lm_head.weight.isnan().any() == (policy == "ignore")


def test_norm_in_manual_optimization_is_of_the_optimizer_that_is_clipped():
    class Manual(ClippedLM):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            expected = []
            for optimizer in self.optimizers():
                parameters = optimizer.param_groups[0]["params"]
                expected.append(squared_gradient_norm(parameters) ** 0.5)
                self.clip_gradients(optimizer, gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm")
                self.norms.append(self.trainer.callback_metrics["grad_norm"].item())
                assert squared_gradient_norm(parameters) ** 0.5 == pytest.approx(MAX_NORM, rel=1e-5)
                optimizer.step()
            assert self.norms[-2:] == pytest.approx(expected)

        def configure_optimizers(self):
            inner, outer = list(self.model.model.parameters()), list(self.model.lm_head.parameters())
            return [make_optimizer(inner), make_optimizer(outer)]

    # A backward inside training_step is one inside forward of what is wrapped around the module.
    lm = Manual(wrap=("model", "lm_head"))
    make_trainer(root=None, strategy=LigerStrategy(kernels="none")).fit(
        lm, DataLoader(whole_batches(), batch_size=None)
    )
    assert len(lm.norms) == 2 * NUM_BATCHES


@pytest.mark.parametrize("clipping", [{"max_norm": MAX_NORM}, {"clip_val": MAX_VALUE}], ids=["norm", "value"])
def test_fabric_clips_on_one_process(clipping):
    fabric = L.Fabric(strategy="liger_fsdp", accelerator="cpu", devices=1)
    fabric.launch()
    model = fabric.setup_module(build_model())
    optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
    batch = make_scaled_batches(0)[0]
    fabric.backward(outside_loss(model(batch["input_ids"]).logits, batch["input_ids"]))
    expected = squared_gradient_norm(model.parameters()) ** 0.5
    norm = fabric.clip_gradients(model, optimizer, **clipping)
    if "max_norm" in clipping:
        assert norm.item() == pytest.approx(expected)
        assert squared_gradient_norm(model.parameters()) ** 0.5 == pytest.approx(MAX_NORM, rel=1e-5)
    else:
        largest = max(parameter.grad.abs().max().item() for parameter in model.parameters())
        assert largest == pytest.approx(MAX_VALUE)


def test_fused_optimizer_is_clipped_in_mixed_precision_without_a_scaler():
    class Fused(ClippedLM):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.optimized_parameters(), lr=3e-3, fused=True)

    lm = Fused()
    trainer = make_trainer(root=None, strategy="liger", precision="bf16-mixed", **CLIPPING["norm"])
    trainer.fit(lm, DataLoader(whole_batches(), batch_size=None))
    reference = train_plainly(whole_batches(), **CLIPPING["norm"])
    torch.testing.assert_close(lm.norms, reference.norms_before, rtol=2e-2, atol=0.0)
    clipped = [math.sqrt(squares) for squares in lm.local_squared_norms]
    assert clipped == pytest.approx([MAX_NORM] * NUM_BATCHES, rel=1e-4)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_fused_optimizer_is_refused_where_gradients_would_be_clipped_scaled(algorithm):
    optimizer = torch.optim.AdamW(build_model().parameters(), fused=True)
    with pytest.raises(RuntimeError, match=r"gradient_clip_val=0.5 with precision='16-mixed'.*AdamW with fused=True"):
        LigerPrecisionPlugin("16-mixed").clip_gradients(optimizer, MAX_NORM, algorithm)
