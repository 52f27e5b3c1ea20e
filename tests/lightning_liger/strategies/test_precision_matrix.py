"""Each precision under every engine: dtypes are those of Lightning's own, losses near those of float32."""

import functools

import lightning as L
import pytest
import torch

from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    Reference,
    logit_counts,
    make_loader,
    make_trainer,
    make_uneven_batches,
    reference_training,
)
from tests.lightning_liger.strategies.workers.engines import ENGINES
from tests.lightning_liger.strategies.workers.precisions import (
    BROKEN_BATCH,
    NUM_BATCHES,
    NUM_MICRO_BATCHES,
    PRECISIONS,
    SCALED_ENGINES,
    is_trained,
)

COMPUTED_IN = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
}
KEPT_IN = {**dict.fromkeys(PRECISIONS, torch.float32), "bf16-true": torch.bfloat16}
"""Parameters, their gradients and the optimizer's states."""
COMBINATIONS = [(engine, precision) for engine in ENGINES for precision in PRECISIONS if is_trained(engine, precision)]
DTYPES = ("parameter_dtypes", "gradient_dtypes", "state_dtypes", "loss_dtypes")

each = pytest.mark.parametrize(("engine", "precision"), COMBINATIONS)


@functools.cache
def reference_of(device: str) -> Reference:
    """One process in float32 with the stock model."""
    make = functools.partial(make_uneven_batches, num_batches=NUM_BATCHES)
    return reference_training(False, device, True, make, NUM_MICRO_BATCHES)


@each
def test_dtypes_are_those_that_the_precision_promises(engine_runs, engine, precision):
    for run in engine_runs.of(f"{engine}-{precision}"):
        for kind in DTYPES[:3]:
            assert run[kind] == {KEPT_IN[precision]}, kind
        assert run["loss_dtypes"] == {torch.float32}


@each
def test_dtypes_and_scales_are_those_of_lightnings_own_strategy(engine_runs, engine, precision):
    if engine == "liger_fsdp" and engine_runs.device == "cpu":
        pytest.skip("Lightning's FSDP needs GPUs")
    for ours, own in zip(*(engine_runs.of(f"{prefix}{engine}-{precision}") for prefix in ("", "own-")), strict=True):
        assert {kind: ours[kind] for kind in DTYPES} == {kind: own[kind] for kind in DTYPES}
        assert ours["scale"] == own["scale"]
        assert (ours["logit_counts"], own["logit_counts"]) == ((NUM_BATCHES, 0), (0, 0))


@each
def test_losses_and_norms_are_those_of_float32_within_rounding(engine_runs, engine, precision):
    reference, runs = reference_of(engine_runs.device), engine_runs.of(f"{engine}-{precision}")
    eps = torch.finfo(COMPUTED_IN[precision]).eps
    exact = precision == "32-true"
    # Weights in bfloat16 do not take updates below half their spacing, so trainings part; what is mixed keeps them.
    for losses, run in zip(reference.losses, runs, strict=True):
        rtol = 1e-5 if exact else 6 * eps if precision == "bf16-true" else eps
        torch.testing.assert_close(run["losses"], losses, rtol=rtol, atol=1e-7)
        # Added up in float32: no loss but that of no tokens is a number of the lower precision.
        if not exact:
            rounded = torch.tensor([loss for loss in run["losses"] if loss]).to(COMPUTED_IN[precision]).float()
            assert (rounded != torch.tensor([loss for loss in run["losses"] if loss])).all()
    first = reference.squared_norms[0] ** 0.5
    rtol = 1e-5 if exact else 32 * eps if precision == "bf16-true" else 2 * eps
    for run in runs:
        assert run["norms"][0] == pytest.approx(first, rel=rtol)
    assert runs[0]["losses"][-2] < runs[0]["losses"][0] - 0.3


def test_gradients_of_the_mean_over_tokens_are_the_same_under_a_loss_scale(engine_runs):
    norms = [norm**0.5 for norm in reference_of(engine_runs.device).squared_norms]
    for engine in SCALED_ENGINES:
        for run in engine_runs.of(f"{engine}-16-mixed"):
            assert run["scale"] == 2.0**16
            torch.testing.assert_close(run["norms"], norms, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("engine", SCALED_ENGINES)
def test_scaler_skips_the_step_that_overflows_on_one_rank_and_halves_its_scale(engine_runs, engine):
    broken, without = (engine_runs.of(f"{engine}-{name}") for name in ("broken", "without"))
    assert not all(torch.isfinite(torch.tensor(broken[1]["losses"])))
    start = BROKEN_BATCH - BROKEN_BATCH % NUM_MICRO_BATCHES
    for run, other in zip(broken, without, strict=True):
        assert (run["scale"], other["scale"]) == (2.0**15, 2.0**16)
        losses = run["losses"][:start] + run["losses"][start + NUM_MICRO_BATCHES :]
        # Another scale rounds what is tiny in float16 another way.
        torch.testing.assert_close(losses, other["losses"], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(run["whole"], other["whole"], rtol=0.0, atol=1e-3)


# One process


@pytest.mark.parametrize("strategy", ["liger", "liger_ddp"])
def test_float16_on_a_cpu_becomes_bfloat16_as_lightning_warns(tmp_path, strategy):
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU. Using `precision='bf16-mixed'`"):
        trainer = make_trainer(root=tmp_path, strategy=strategy, precision="16-mixed")
    assert trainer.precision == "bf16-mixed"
    module = LM()
    trainer.fit(module, make_loader(0, 1))
    assert logit_counts(module) == (1, 0)


def test_mixed_float16_with_fsdp2_is_refused_with_what_there_is():
    strategy = L.pytorch.strategies.StrategyRegistry.get("liger_model_parallel")
    with pytest.raises(ValueError, match=r"does not support .*precision='16-mixed'.* among: 32-true, bf16-mixed"):
        L.Trainer(strategy=strategy, accelerator="cpu", devices=1, precision="16-mixed", logger=False)


def test_one_cpu_scales_its_losses_under_fsdp(tmp_path):
    trainer = make_trainer(root=tmp_path, strategy="liger_fsdp", precision="16-mixed")
    trainer.fit(LM(), make_loader(0, 2))
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**16
    assert trainer.precision_plugin.state_dict()["_growth_tracker"] == 2
