"""Gradients that are clipped, not finite or of lower precision, under every engine, as in one process."""

import functools
import math
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_liger import (
    FabricLigerFSDPStrategy,
    LigerDDPStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
    LigerPrecisionPlugin,
    LigerSingleDeviceStrategy,
)
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    NUM_RANKS,
    Batch,
    build_model,
    make_batches,
    make_loader,
    make_optimizer,
    make_trainer,
    make_uneven_batches,
)
from tests.lightning_liger.strategies.workers.trainings import (
    assert_trained_as,
    fit,
    fit_with_fabric,
    rank_main,
    reference_training,
)

ENGINES = {
    "liger_ddp": LigerDDPStrategy,
    "liger_fsdp": LigerFSDPStrategy,
    "liger_model_parallel": LigerModelParallelStrategy,
}
NUM_BATCHES = 4
BROKEN_BATCH = 1
MAX_NORM = 0.2
"""Below the norm in every step of the tests."""
MAX_VALUE = 0.01
CLIPPING: dict[str, dict[str, Any]] = {
    "unclipped": {},
    "norm": {"gradient_clip_val": MAX_NORM},
    "value": {"gradient_clip_val": MAX_VALUE, "gradient_clip_algorithm": "value"},
}
LIMITS = {"unclipped": {}, "norm": {"max_norm": MAX_NORM}, "value": {"max_value": MAX_VALUE}}
POLICIES = [("raise", "norm"), ("ignore", "norm"), *(("skip", clipping) for clipping in CLIPPING)]
"""What to do with gradients that are not finite, and the ways of clipping with which it is tried."""

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
SCALED_ENGINES = ("liger_ddp", "liger_fsdp")
"""Lightning knows no loss scale with FSDP2."""
TRAINED = [(each, name) for each in ENGINES for name in PRECISIONS if name != "16-mixed" or each in SCALED_ENGINES]
NUM_PRECISE_BATCHES = 10
NUM_MICRO_BATCHES = 2
OVERFLOWING_BATCH = 3
"""In the second step."""


class Scaled(LM):
    """The tiny model, whose loss is multiplied by what the batch says."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs = dict(batch)
        return inputs.pop("scale") * super().training_step(inputs, batch_idx)


def without_overflow(batches: list[Any]) -> list[Any]:
    """What is there for all micro-batches, but for those of the step that overflows."""
    start = OVERFLOWING_BATCH - OVERFLOWING_BATCH % NUM_MICRO_BATCHES
    return batches[:start] + batches[start + NUM_MICRO_BATCHES :]


class PartlySharded(Scaled):
    """The head is in no FSDP unit."""

    def configure_model(self) -> None:
        super().configure_model()
        wrap_inside(self.model, self.trainer.strategy.root_device, "model")


def wrap_inside(model: nn.Module, device: torch.device, *names: str) -> nn.Module:
    """Makes FSDP roots of the named children."""
    model.to(device)
    for name in names:
        setattr(model, name, FullyShardedDataParallel(getattr(model, name), use_orig_params=True, device_id=device))
    return model


def scaled(batches: list[Batch], rank: int, broken: int | None = None) -> list[Batch]:
    """``batches``; gradients of the one with the index ``broken`` are not finite on rank 1."""
    scales = [float("inf") if rank == 1 and index == broken else 1.0 for index in range(len(batches))]
    return [batch | {"scale": torch.tensor(scale)} for batch, scale in zip(batches, scales, strict=True)]


def _acting(run: dict[str, Any], make: Any, **options: Any) -> dict[tuple[str, str], Any]:
    """What a rank got with each policy."""
    batches = scaled(make_batches(run["rank"], NUM_BATCHES), run["rank"], BROKEN_BATCH)
    return {
        (policy, clipping): fit(
            run, make(on_nonfinite_grad=policy), Scaled(), batches, may_fail=True, **CLIPPING[clipping], **options
        )
        for policy, clipping in POLICIES
    }


def _with_fabric(
    run: dict[str, Any], model: nn.Module, broken: int | None = None, clipping: Any = None, **options: Any
) -> dict[str, Any]:
    return fit_with_fabric(
        run,
        FabricLigerFSDPStrategy(**options),
        model,
        scaled(make_batches(run["rank"], NUM_BATCHES), run["rank"], broken),
        lambda model, batch: batch.pop("scale") * model(**batch).loss,
        partial(L.Fabric.clip_gradients, **(clipping or {"max_norm": MAX_NORM})),
    )


def _clipped(run: dict[str, Any]) -> dict[str, Any]:
    device = torch.device("cuda", run["rank"]) if run["device"] == "cuda" else torch.device("cpu")
    plain, batches = LigerFSDPStrategy(kernels="none"), scaled(make_batches(run["rank"], NUM_BATCHES), run["rank"])
    return {
        **{f"{name}-acting": _acting(run, make) for name, make in ENGINES.items()},
        "outside": fit(run, plain, PartlySharded(), batches, may_fail=True, **CLIPPING["norm"]),
        "flat": _with_fabric(run, build_model(), use_orig_params=False),
        "roots": _with_fabric(run, wrap_inside(build_model(), device, "model", "lm_head"), kernels="none"),
        "value": _with_fabric(run, build_model(), clipping={"clip_val": MAX_VALUE}),
        "raise": _with_fabric(run, build_model(), BROKEN_BATCH),
        "ignore": _with_fabric(run, build_model(), BROKEN_BATCH, {"max_norm": MAX_NORM, "error_if_nonfinite": False}),
    }


def _precision(engine: str, precision: str, device: str) -> dict[str, Any]:
    """The precision; on a CPU Lightning takes float16 for DDP only as a plugin."""
    if (engine, precision, device) == ("liger_ddp", "16-mixed", "cpu"):
        return {"plugins": [MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu"))]}
    return {"precision": precision}


def _precise(run: dict[str, Any]) -> dict[str, Any]:
    """What a rank got out of each precision; and, where there is a scaler, out of batches one of which overflows."""
    found, rank = {}, run["rank"]
    train = partial(fit, run, accumulate_grad_batches=NUM_MICRO_BATCHES)
    batches = make_uneven_batches(rank, NUM_PRECISE_BATCHES)
    for engine in ENGINES:
        for precision in (each for name, each in TRAINED if name == engine):
            options = partial(_precision, engine, precision, run["device"])
            found[f"{engine}-{precision}"] = train(engine, LM(), batches, gradient_clip_val=1e6, **options())
        if engine in SCALED_ENGINES:
            options = partial(_precision, engine, "16-mixed", run["device"])
            broken = scaled(batches, rank, OVERFLOWING_BATCH)
            found[f"{engine}-broken"] = train(engine, Scaled(), broken, **options())
            found[f"{engine}-without"] = train(engine, Scaled(), scaled(without_overflow(batches), rank), **options())
    return found


def results(run: dict[str, Any]) -> dict[str, Any]:
    return _clipped(run) | _precise(run)


# What is checked of them

COMPUTED_IN = {"32-true": torch.float32, "16-mixed": torch.float16} | dict.fromkeys(
    ("bf16-mixed", "bf16-true"), torch.bfloat16
)
KEPT_IN = {**dict.fromkeys(PRECISIONS, torch.float32), "bf16-true": torch.bfloat16}
"""Parameters, their gradients and the optimizer's states."""
DTYPES = ("parameter_dtypes", "gradient_dtypes", "state_dtypes", "loss_dtypes")


@functools.cache
def reference_of(device, clipping, per_token=True, skips=False, first=0):
    """One process in float32 with the stock model and the batches of all ranks, or those from the first on."""
    batches = [make_batches(rank, NUM_BATCHES) for rank in range(first, 2 if first else NUM_RANKS)]
    for own in batches if skips else ():
        del own[BROKEN_BATCH]
    return reference_training(build_model(), batches, device, per_token=per_token, **LIMITS[clipping])


# Clipping, and gradients that are not finite


@pytest.mark.parametrize("way", ["flat", "roots", "value"])
def test_ranks_with_fabric_clip_as_one_process(ranks, way):
    reference = reference_of(ranks.device, "value" if way == "value" else "norm", per_token=False)
    assert_trained_as(reference, ranks.of(way), ranks.device)


def test_parameters_in_no_unit_are_an_error_that_names_one(ranks):
    for result in ranks.results:
        assert result["outside"]["error"].startswith("ValueError: clipping by norm needs every trained parameter in an")
        assert "1 of 21 are in none, such as 'model.lm_head.weight' of shape (97, 33)" in result["outside"]["error"]


def assert_acted(found: list[dict[tuple[str, str], Any]], device: str, first: int = 0) -> None:
    for result in found:
        raising, ignoring = result["raise", "norm"], result["ignore", "norm"]
        assert raising["error"].endswith("on_nonfinite_grad='raise': the norm of the gradients is nan, not finite")
        assert len(raising["norms"]) == BROKEN_BATCH
        assert ignoring["whole"]["lm_head.weight"].isnan().any()
    for clipping in CLIPPING:
        skipping = [result["skip", clipping] for result in found]
        for rank, run in enumerate(skipping, first):  # training is as if that step had not been
            assert math.isnan(run["norms"].pop(BROKEN_BATCH))
            assert not math.isfinite(run["losses"].pop(BROKEN_BATCH)) or rank == 0
        assert_trained_as(reference_of(device, clipping, skips=True, first=first), skipping, device)


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_act_together_on_gradients_that_are_not_finite(ranks, engine):
    assert_acted(ranks.of(f"{engine}-acting"), ranks.device)


def test_one_device_acts_on_gradients_that_are_not_finite_whoever_shares_its_plugin(one_process):
    found = _acting(one_process, LigerSingleDeviceStrategy, plugins=[Precision()])
    assert_acted([found], "cpu", first=1)


def test_fabric_raises_on_every_rank_unless_told_otherwise(ranks):
    error = "RuntimeError: error_if_nonfinite=True: the norm of the gradients is nan, not finite"
    for raising, ignoring in zip(ranks.of("raise"), ranks.of("ignore"), strict=True):
        assert raising["errors"] == [None, error, None, None]
        assert ignoring["errors"] == [None] * NUM_BATCHES
        assert math.isnan(ignoring["norms"][BROKEN_BATCH])


# Precisions


@functools.cache
def precise_reference(device):
    """One process in float32 with the stock model."""
    batches = [make_uneven_batches(rank, NUM_PRECISE_BATCHES) for rank in range(NUM_RANKS)]
    return reference_training(build_model(), batches, device, num_micro_batches=NUM_MICRO_BATCHES)


@pytest.mark.parametrize(("engine", "precision"), TRAINED)
def test_losses_and_norms_are_those_of_float32_within_rounding_and_dtypes_as_promised(ranks, engine, precision):
    device, results, _ = ranks
    reference, runs = precise_reference(device), [result[f"{engine}-{precision}"] for result in results]
    for run in runs:
        assert [run[kind] for kind in DTYPES] == [{KEPT_IN[precision]}] * 3 + [{torch.float32}]
        assert run["logit_counts"] == (NUM_PRECISE_BATCHES, 0)
    eps = torch.finfo(COMPUTED_IN[precision]).eps
    exact = precision == "32-true"
    # Weights in bfloat16 do not take updates below half their spacing, so trainings part; what is mixed keeps them.
    for losses, run in zip(reference.losses, runs, strict=True):
        rtol = 1e-5 if exact else 6 * eps if precision == "bf16-true" else eps
        torch.testing.assert_close(run["losses"], losses, rtol=rtol, atol=1e-7)
        # Added up in float32: no loss but that of no tokens is a number of the lower precision.
        found = torch.tensor([loss for loss in run["losses"] if loss])
        assert exact or (found.to(COMPUTED_IN[precision]).float() != found).all()
        rtol = 1e-5 if exact else 32 * eps if precision == "bf16-true" else 2 * eps
        assert run["norms"][0] == pytest.approx(reference.norms[0], rel=rtol)
    assert runs[0]["losses"][-2] < runs[0]["losses"][0] - 0.3


@pytest.mark.parametrize("engine", SCALED_ENGINES)
def test_scaler_scales_losses_and_skips_the_step_that_overflows_on_one_rank(ranks, engine):
    device, results, _ = ranks
    for result in results:
        run = result[f"{engine}-16-mixed"]
        assert run["scale"] == 2.0**16
        torch.testing.assert_close(run["norms"], precise_reference(device).norms, rtol=1e-2, atol=0.0)
        broken, without = result[f"{engine}-broken"], result[f"{engine}-without"]
        assert (broken["scale"], without["scale"]) == (2.0**15, 2.0**16)
        # Another scale rounds what is tiny in float16 another way.
        torch.testing.assert_close(without_overflow(broken["losses"]), without["losses"], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(broken["whole"], without["whole"], rtol=0.0, atol=1e-3)
    assert not all(map(math.isfinite, results[1][f"{engine}-broken"]["losses"]))


# One process


@pytest.fixture
def one_process(one_process):
    """A run of the second rank alone, whose gradients break."""
    return one_process | {"rank": 1}


def test_norm_in_manual_optimization_is_of_the_optimizer_that_is_clipped():
    class Manual(LM):
        automatic_optimization = False
        num_clipped = 0

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.model(**batch).loss)
            for optimizer in self.optimizers():
                gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
                norm = torch.nn.utils.get_total_norm(gradients).item()
                self.clip_gradients(optimizer, gradient_clip_val=norm / 2, gradient_clip_algorithm="norm")
                assert self.trainer.callback_metrics["grad_norm"].item() == pytest.approx(norm)
                assert torch.nn.utils.get_total_norm(gradients).item() == pytest.approx(norm / 2, rel=1e-4)
                optimizer.step()
                optimizer.zero_grad()
                self.num_clipped += 1

        def configure_optimizers(self):
            return [make_optimizer(list(child.parameters())) for child in (self.model.model, self.model.lm_head)]

    module = Manual()
    make_trainer(root=None, strategy="liger").fit(module, make_loader(0, 3))
    assert module.num_clipped == 6


def test_fused_optimizer_is_clipped_in_mixed_precision_without_a_scaler(one_process):
    class Fused(Scaled):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1, fused=True)

    batches = scaled(make_batches(1, NUM_BATCHES), 1)
    norms = fit(one_process, "liger", Fused(), batches, precision="bf16-mixed", **CLIPPING["norm"])["norms"]
    torch.testing.assert_close(norms, reference_of("cpu", "norm", first=1).norms, rtol=2e-2, atol=0.0)


def test_fused_optimizer_is_refused_where_gradients_would_be_clipped_scaled():
    optimizer = torch.optim.AdamW(build_model().parameters(), fused=True)
    for algorithm in ("norm", "value"):
        with pytest.raises(RuntimeError, match=r"gradient_clip_val=0.2 with precision='16-mixed'.*with fused=True"):
            LigerPrecisionPlugin("16-mixed").clip_gradients(optimizer, MAX_NORM, algorithm)


if __name__ == "__main__":
    rank_main(results)
