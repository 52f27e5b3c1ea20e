"""Gradients that are clipped, not finite or of lower precision, under every engine, as in one process."""

import functools
import math

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

from lightning_liger import LigerPrecisionPlugin, LigerSingleDeviceStrategy, LigerStrategy
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    NUM_RANKS,
    build_model,
    launch,
    make_batches,
    make_loader,
    make_optimizer,
    make_trainer,
    make_uneven_batches,
    squared_gradient_norm,
)
from tests.lightning_liger.strategies.workers.gradients import (
    BROKEN_BATCH,
    CLIPPING,
    ENGINES,
    MAX_NORM,
    MAX_VALUE,
    NUM_BATCHES,
    NUM_MICRO_BATCHES,
    NUM_PRECISE_BATCHES,
    OVERFLOWING_BATCH,
    POLICIES,
    PRECISIONS,
    SCALED_ENGINES,
    Scaled,
    is_trained,
    scaled,
    wrap_inside,
)
from tests.lightning_liger.strategies.workers.trainings import (
    Recorder,
    assert_same_parameters,
    assert_trained_as,
    reference_training,
)

LIMITS = {"unclipped": {}, "norm": {"max_norm": MAX_NORM}, "value": {"max_value": MAX_VALUE}}
BROKEN = [
    (engine, clipping) for engine in ENGINES for clipping in CLIPPING if clipping != "value" or engine == "liger_fsdp"
]
broken_under_each = pytest.mark.parametrize(("engine", "clipping"), BROKEN)

COMPUTED_IN = {"32-true": torch.float32, "16-mixed": torch.float16} | dict.fromkeys(
    ("bf16-mixed", "bf16-true"), torch.bfloat16
)
KEPT_IN = {**dict.fromkeys(PRECISIONS, torch.float32), "bf16-true": torch.bfloat16}
"""Parameters, their gradients and the optimizer's states."""
DTYPES = ("parameter_dtypes", "gradient_dtypes", "state_dtypes", "loss_dtypes")
in_each_precision = pytest.mark.parametrize(
    ("engine", "precision"), [(e, p) for e in ENGINES for p in PRECISIONS if is_trained(e, p)]
)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request, tmp_path_factory):
    """The device, and what each rank got out of every run."""
    worker = "tests.lightning_liger.strategies.workers.gradients"
    return request.param, launch(request.param, tmp_path_factory.mktemp("ranks"), worker)


@functools.cache
def reference_of(device="cpu", clipping="unclipped", of_tokens=True, skips=False, num_ranks=NUM_RANKS):
    batches = [make_batches(rank, NUM_BATCHES) for rank in range(num_ranks)]
    for own in batches if skips else ():
        del own[BROKEN_BATCH]
    return reference_training(build_model(), batches, device, of_tokens=of_tokens, **LIMITS[clipping])


# Clipping, and gradients that are not finite


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_clip_by_value_as_one_process(ranks, engine):
    device, results = ranks
    runs = [result[f"{engine}-value"] for result in results]
    assert_trained_as(reference_of(device, "value"), runs, device)
    assert all(math.isnan(norm) for run in runs for norm in run["norms"])  # nothing logged


@pytest.mark.parametrize(("way", "clipping"), [("flat", "norm"), ("roots", "norm"), ("value", "value")])
def test_ranks_with_fabric_clip_as_one_process(ranks, way, clipping):
    device, results = ranks
    runs = [result[f"fabric-{way}"] for result in results]
    assert_trained_as(reference_of(device, clipping, of_tokens=False), runs, device)


def test_parameters_in_no_unit_are_an_error_that_names_one(ranks):
    for result in ranks[1]:
        assert result["outside"]["error"].startswith("ValueError: clipping by norm needs every trained parameter in an")
        assert "1 of 21 are in none, such as 'model.lm_head.weight' of shape (97, 33)" in result["outside"]["error"]


@broken_under_each
def test_ranks_act_together_on_gradients_that_are_not_finite(ranks, engine, clipping):
    device, results = ranks
    raising, skipping, ignoring = (
        [result[f"{engine}-{policy}-{clipping}"] for result in results] for policy in POLICIES
    )
    for run in raising:
        assert run["error"] == "RuntimeError: on_nonfinite_grad='raise': the norm of the gradients is nan, not finite"
        assert len(run["norms"]) == BROKEN_BATCH
    for run in ignoring:
        assert run["error"] is None
        assert run["whole"]["lm_head.weight"].isnan().any()
    for run in skipping:  # training is as if that step had not been
        assert math.isnan(run["norms"].pop(BROKEN_BATCH))
        assert not math.isfinite(run["losses"].pop(BROKEN_BATCH)) or run is skipping[0]
    assert_trained_as(reference_of(device, clipping, skips=True), skipping, device)


def test_fabric_raises_on_every_rank_unless_told_otherwise(ranks):
    error = "RuntimeError: error_if_nonfinite=True: the norm of the gradients is nan, not finite"
    for result in ranks[1]:
        assert result["fabric-raise"]["errors"] == [None, error, None, None]
        assert result["fabric-ignore"]["errors"] == [None] * NUM_BATCHES
        assert math.isnan(result["fabric-ignore"]["norms"][BROKEN_BATCH])


# Precisions


@functools.cache
def precise_reference(device):
    """One process in float32 with the stock model."""
    batches = [make_uneven_batches(rank, NUM_PRECISE_BATCHES) for rank in range(NUM_RANKS)]
    return reference_training(build_model(), batches, device, num_micro_batches=NUM_MICRO_BATCHES)


@in_each_precision
def test_losses_and_norms_are_those_of_float32_within_rounding_and_dtypes_as_promised(ranks, engine, precision):
    device, results = ranks
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
    device, results = ranks
    for result in results:
        run = result[f"{engine}-16-mixed"]
        assert run["scale"] == 2.0**16
        torch.testing.assert_close(run["norms"], precise_reference(device).norms, rtol=1e-2, atol=0.0)
        broken, without = result[f"{engine}-broken"], result[f"{engine}-without"]
        assert (broken["scale"], without["scale"]) == (2.0**15, 2.0**16)
        start = OVERFLOWING_BATCH - OVERFLOWING_BATCH % NUM_MICRO_BATCHES
        losses = broken["losses"][:start] + broken["losses"][start + NUM_MICRO_BATCHES :]
        # Another scale rounds what is tiny in float16 another way.
        torch.testing.assert_close(losses, without["losses"], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(broken["whole"], without["whole"], rtol=0.0, atol=1e-3)
    assert not all(map(math.isfinite, results[1][f"{engine}-broken"]["losses"]))


# One process


def train(strategy, clipping="unclipped", broken=None, module=None, **options):
    """The module and the logged norms of training on the batches of rank 1."""
    recorder, module = Recorder(), module or Scaled()
    trainer = make_trainer(recorder, root=None, strategy=strategy, **CLIPPING[clipping], **options)
    trainer.fit(module, DataLoader(scaled(make_batches(1, NUM_BATCHES), 1, broken), batch_size=None))
    return module, recorder.norms


def whole_reference(clipping="unclipped", skips=False):
    batches = make_batches(1, NUM_BATCHES)
    del batches[BROKEN_BATCH : BROKEN_BATCH + skips]
    return reference_training(build_model(), [batches], **LIMITS[clipping])


@pytest.mark.parametrize("clipping", ["norm", "value"])
def test_one_device_clips_as_plain_pytorch_does(clipping):
    module, norms = train("liger", clipping)
    reference = whole_reference(clipping)
    if clipping == "norm":
        torch.testing.assert_close(norms, reference.norms, rtol=1e-5, atol=0.0)
    assert_same_parameters(dict(module.model.named_parameters()), reference.parameters, 1e-4)


def test_one_device_acts_on_gradients_that_are_not_finite_whoever_shares_its_plugin():
    plugin = MixedPrecision("bf16-mixed", "cpu")
    for options in ({}, {"plugins": [plugin]}):
        with pytest.raises(RuntimeError, match="on_nonfinite_grad='raise': the norm of the gradients is nan"):
            train(LigerSingleDeviceStrategy(on_nonfinite_grad="raise"), broken=BROKEN_BATCH, **options)
        module, _ = train(LigerSingleDeviceStrategy(on_nonfinite_grad="ignore"), broken=BROKEN_BATCH, **options)
        assert module.model.lm_head.weight.isnan().any()
        strategy = LigerSingleDeviceStrategy(on_nonfinite_grad="skip")
        module, norms = train(strategy, broken=BROKEN_BATCH, **options)
        assert math.isnan(norms.pop(BROKEN_BATCH))
        if options:
            assert strategy.precision_plugin is plugin
            continue
        reference = whole_reference(skips=True)
        torch.testing.assert_close(norms, reference.norms, rtol=1e-5, atol=0.0)
        assert_same_parameters(dict(module.model.named_parameters()), reference.parameters, 1e-4)


def test_norm_in_manual_optimization_is_of_the_optimizer_that_is_clipped():
    class Manual(LM):
        automatic_optimization = False
        num_clipped = 0

        def configure_model(self):
            if getattr(self, "model", None) is None:
                # A backward inside training_step is one inside forward of what is wrapped around the module.
                self.model = wrap_inside(build_model(), torch.device("cpu"), "model", "lm_head")

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(self.model(**batch).loss)
            for optimizer in self.optimizers():
                parameters = optimizer.param_groups[0]["params"]
                expected = squared_gradient_norm(parameters) ** 0.5
                self.clip_gradients(optimizer, gradient_clip_val=expected / 2, gradient_clip_algorithm="norm")
                assert self.trainer.callback_metrics["grad_norm"].item() == pytest.approx(expected)
                assert squared_gradient_norm(parameters) ** 0.5 == pytest.approx(expected / 2, rel=1e-4)
                optimizer.step()
                self.num_clipped += 1

        def configure_optimizers(self):
            return [make_optimizer(list(child.parameters())) for child in (self.model.model, self.model.lm_head)]

    module = Manual()
    make_trainer(root=None, strategy=LigerStrategy(kernels="none")).fit(module, make_loader(0, 3))
    assert module.num_clipped == 6


def test_fused_optimizer_is_clipped_in_mixed_precision_without_a_scaler():
    class Fused(Scaled):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1, fused=True)

    _, norms = train("liger", "norm", module=Fused(), precision="bf16-mixed")
    torch.testing.assert_close(norms, whole_reference("norm").norms, rtol=2e-2, atol=0.0)


def test_fused_optimizer_is_refused_where_gradients_would_be_clipped_scaled():
    optimizer = torch.optim.AdamW(build_model().parameters(), fused=True)
    for algorithm in ("norm", "value"):
        with pytest.raises(RuntimeError, match=r"gradient_clip_val=0.2 with precision='16-mixed'.*with fused=True"):
            LigerPrecisionPlugin("16-mixed").clip_gradients(optimizer, MAX_NORM, algorithm)
