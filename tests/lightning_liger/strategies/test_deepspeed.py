"""``liger_deepspeed_stage_2`` and ``_3``: two processes under DeepSpeed against one with the stock model."""

import functools
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_liger import (
    FabricLigerDeepSpeedStrategy,
    LazyLogits,
    LigerCausalLM,
    LigerDeepSpeedStrategy,
    LigerSingleDeviceStrategy,
    divergence,
    lazy_logits,
    token_loss,
    token_scores,
)
from lightning_liger.strategies import deepspeed as tested
from lightning_liger.strategies.deepspeed import _whole_parameters
from lightning_liger.strategies.parts import activations
from tests.lightning_liger.activations.simulated import FakeMemory
from tests.lightning_liger.strategies.workers.distributed import (
    HEADS,
    LM,
    NUM_RANKS,
    AddsToLoss,
    Batch,
    KindsOfLogits,
    Losses,
    build_model,
    logit_counts,
    make_batches,
    make_loader,
    make_trainer,
    make_uneven_batches,
    outside_loss,
    regularized,
    skip_shared_memory_op,
)
from tests.lightning_liger.strategies.workers.trainings import (
    TOLERANCE,
    assert_same_parameters,
    assert_trained_as,
    fit,
    fit_with_fabric,
    freeze,
    loss_of_labels,
    loss_of_logits,
    rank_main,
    reference_training,
    whole_parameters,
    with_adapters,
)

NUM_STEPS = 6
MAX_NORM = 0.5
"""Below the norm in every step of the tests."""
PRETRAINED = "pretrained"
"""The folder of a checkpoint of the stock model."""

STAGES = (2, 3)
CONFIGS: dict[int, dict[str, Any]] = {
    # With DeepSpeed's own threshold no parameter of a tiny model is ever freed.
    stage: {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage, **own}}
    for stage, own in ((2, {}), (3, {"stage3_param_persistence_threshold": 0}))
}
PRECISIONS = {2: ("bf16-mixed", "16-mixed"), 3: ("bf16-mixed", "bf16-true")}


def two_epoch_batches(rank: int, num_batches: int) -> list[Batch]:
    return 2 * make_batches(rank, num_batches // 2)


UNEVEN = {"make": make_uneven_batches, "num_micro_batches": 2}
TIED = {"model": partial(build_model, tied=True)}
MEAN_OF_RANKS = {"per_token": False}
WAYS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": TIED,
    "by-name": {},
    "recomputed": {},
    "planned": UNEVEN,
    "uneven": {**UNEVEN, "change": regularized},
    "clipped": {"num_micro_batches": 2, "max_norm": MAX_NORM},
    "fabric-labels": MEAN_OF_RANKS,
    "fabric-logits": {**TIED, **MEAN_OF_RANKS},
    "fabric-scores": MEAN_OF_RANKS,
    "unfinished": {"make": two_epoch_batches, "num_micro_batches": 2},
    "two-epochs": {"make": two_epoch_batches},
    "partitioned-untied": {},
    "partitioned-tied": TIED,
    "own-step": MEAN_OF_RANKS,
    "frozen-head": {"model": lambda: freeze(build_model(), "lm_head")},
    "adapted-tied": {"model": lambda: with_adapters("q_proj", "lm_head", model=build_model(tied=True))},
    "whole-logits": MEAN_OF_RANKS,
}
"""What is trained, and how one process does it."""
OF_ONE_STAGE = {"two-epochs": None, "unfinished": 2, "by-name": 3, "recomputed": 3, "planned": 3} | dict.fromkeys(
    ("partitioned-untied", "partitioned-tied", "own-step", "frozen-head", "adapted-tied", "whole-logits"), "partitioned"
)


class WholeAtFirst(LM):
    """Has its parameters before DeepSpeed can partition them as they are made."""

    def __init__(self, tied: bool = False, build: Callable[[Any], nn.Module] | None = None) -> None:
        super().__init__(tied, build)
        self.model = self.build(self)


class AddsToLossWholeAtFirst(AddsToLoss, WholeAtFirst):
    pass


def _partitioned_at_once(tied: bool) -> LM:
    """Makes its parameters where ZeRO-3 partitions each module's at once, and copies known values into them."""
    import deepspeed

    stock = build_model(tied)

    def build(module: LM) -> nn.Module:
        model = AutoModelForCausalLM.from_config(stock.config, dtype=torch.get_default_dtype())
        for name, parameter in model.named_parameters():
            with torch.no_grad(), deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
                parameter.copy_(stock.get_parameter(name))
        return model

    return LM(build=build)


class NeedsWholeLogits(WholeAtFirst):
    """A loss that is not fused, of the same value."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        return outside_loss(logits + 0.0 * logits.square(), batch["labels"])


class OwnStep(WholeAtFirst):
    """A step through the module's own forward; notes after it whether what the loss had of the head is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free: list[bool] = []

    def forward(self, input_ids: Tensor) -> Any:
        return self.model(input_ids).logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"])
        self.weight_in_loss = weakref.ref(logits.head.weight)
        return outside_loss(logits, batch["labels"])

    def on_train_batch_end(self, *_: Any) -> None:
        status = self.model.lm_head.weight.ds_status.name
        self.is_free.append(status == "NOT_AVAILABLE" and self.weight_in_loss() is None)


def _fit(run: dict[str, Any], strategy: Any, module: Any, **options: Any) -> dict[str, Any]:
    strategy = LigerDeepSpeedStrategy(config=CONFIGS[strategy]) if strategy in CONFIGS else strategy
    batches = options.pop("make", make_batches)(run["rank"], options.pop("num_batches", NUM_STEPS))
    result = fit(run, strategy, module, batches, **options)
    strategy = result["trainer"].strategy
    return result | {"plan": strategy.activation_plan, "loss_scale": strategy.deepspeed_engine.optimizer.loss_scale}


def _loss_of_scores(model: nn.Module, batch: Batch) -> Tensor:
    """The same loss out of scores and log-probabilities, and a divergence of the model from itself, which is 0."""
    with torch.no_grad(), lazy_logits():
        before = model(batch["input_ids"]).logits
    logits = model(batch["input_ids"]).logits
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    kept = labels != -100
    scores = token_scores(logits, labels).log_probs
    total, _ = token_loss(logits, labels, lambda scores, index: -scores.log_probs)
    gathered = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][kept]
    return (total - scores.sum() - gathered.sum()) / (3 * kept.sum()) + divergence(logits, before, kind="jsd")


FABRIC_RUNS: dict[str, tuple[bool, Callable[[nn.Module, Batch], Tensor], int]] = {
    "fabric-labels": (False, loss_of_labels, 1),
    "fabric-logits": (True, loss_of_logits, 1),
    "fabric-scores": (False, _loss_of_scores, 3),
}
"""Whether the head is tied, the loss, and how many fused losses it has."""


def _fabric(run: dict[str, Any], stage: int, tied: bool, loss_of: Callable[..., Tensor]) -> dict[str, Any]:
    import deepspeed

    inner, gradients = build_model(tied), []

    def keep_gradient(fabric: Any, model: nn.Module, optimizer: Any) -> None:
        gradients.append(deepspeed.utils.safe_get_full_grad(inner.lm_head.weight).cpu().clone())

    # Its timers fail if the engine does not know when backward starts.
    strategy = FabricLigerDeepSpeedStrategy(config=CONFIGS[stage] | {"wall_clock_breakdown": True})
    result = fit_with_fabric(run, strategy, inner, make_batches(run["rank"], NUM_STEPS), loss_of, keep_gradient)
    fabric, path = result["fabric"], run["folder"] / f"fabric-{stage}.ckpt"
    state = {"model": result["model"], "optimizer": result["optimizer"], "step": NUM_STEPS}
    fabric.save(path, state)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(inner.parameters()), modifier_rank=0):
        for parameter in inner.parameters():
            parameter.zero_()
    state["step"] = 0
    fabric.load(path, state)
    loaded = {"loaded": whole_parameters(inner, inner), "loaded_step": state["step"]}
    return result | {"head_gradients": gradients} | loaded


def _stages(run: dict[str, Any], stage: int) -> dict[str, Any]:
    module = KindsOfLogits()
    loader = DataLoader(make_batches(run["rank"], 2), batch_size=None)
    trainer = _fit(run, stage, module, num_batches=2)["trainer"]
    trainer.validate(module, loader, verbose=False)
    trainer.test(module, loader, verbose=False)
    trainer.predict(module, loader)
    return {"kinds": module.kinds, "logit_counts": logit_counts(module)}


def _run_stage(run: dict[str, Any], stage: int) -> dict[str, Any]:
    found = {name: _fabric(run, stage, tied, loss_of) for name, (tied, loss_of, _) in FABRIC_RUNS.items()}

    def train(name: str, strategy: Any = stage, module: Any = None, **options: Any) -> None:
        found[name] = _fit(run, strategy, module or WholeAtFirst(), **options)

    accumulated = {"accumulate_grad_batches": 2}
    train("untied")
    train("tied", module=WholeAtFirst(tied=True))
    train("uneven", module=AddsToLossWholeAtFirst(), make=make_uneven_batches, **accumulated)
    train("clipped", gradient_clip_val=MAX_NORM, **accumulated)
    found["stages"] = _stages(run, stage)
    from deepspeed.accelerator import get_accelerator

    takes_float16 = get_accelerator().is_fp16_supported()  # some processors do not
    found["precisions"] = [each for each in PRECISIONS[stage] if takes_float16 or each != "16-mixed"]
    for precision in found["precisions"]:
        train(precision, num_batches=12, precision=precision)
    # The data repeats each epoch, so that resuming after one does not depend on how batches are skipped.
    saved = f"stage-{stage}.ckpt"
    train("first-epoch", num_batches=2, save_as=saved)
    train("second-epoch", num_batches=2, max_epochs=2, ckpt_path=run["folder"] / saved)
    if stage == 3:
        train("by-name", "liger_deepspeed_stage_3")
        train("recomputed", LigerDeepSpeedStrategy(config=CONFIGS[3], activation_checkpointing="full"))
        activations.memory_of = lambda device: FakeMemory(2**30)  # type: ignore[assignment]
        budget = LigerDeepSpeedStrategy(config=CONFIGS[3], memory_budget=0.5)
        train("planned", budget, make=make_uneven_batches, **accumulated)
    else:  # epochs of an odd number of micro-batches: the optimizer steps after the first one of the next
        train("unfinished", num_batches=NUM_STEPS // 2, max_epochs=2, **accumulated)
    return found


def _run_partitioned(run: dict[str, Any]) -> dict[str, Any]:
    """What is special about parameters that are partitioned."""
    found = {f"partitioned-{head}": _fit(run, 3, _partitioned_at_once(tied)) for head, tied in HEADS.items()}
    config = build_model().config.to_diff_dict()
    modules = {
        "from-config": LigerCausalLM(model_type=config.pop("model_type"), config=config),
        "from-pretrained": LigerCausalLM(pretrained=str(run["folder"] / PRETRAINED)),
    }
    for name, module in modules.items():
        found[name] = _fit(run, 3, module, limit_train_batches=0)
    own_step = OwnStep()
    found["own-step"] = _fit(run, 3, own_step) | {"is_free": own_step.is_free}
    for name in ("frozen-head", "adapted-tied"):
        found[name] = _fit(run, 3, WholeAtFirst(build=lambda module, name=name: WAYS[name]["model"]()))
    return found | {"whole-logits": _fit(run, 3, NeedsWholeLogits())}


def results(run: dict[str, Any]) -> dict[Any, Any]:
    skip_shared_memory_op()
    found: dict[Any, Any] = {stage: _run_stage(run, stage) for stage in STAGES}
    return found | {"partitioned": _run_partitioned(run)}


# What is checked of them

both_strategies = pytest.mark.parametrize("strategy", [LigerDeepSpeedStrategy, FabricLigerDeepSpeedStrategy])
each_stage = pytest.mark.parametrize("stage", STAGES)


# Two processes


def prepare(folder: Path) -> None:
    build_model().save_pretrained(folder / PRETRAINED)


@functools.cache
def reference_of(way, device, num_steps):
    options = dict(WAYS[way])
    make, model = options.pop("make", make_batches), options.pop("model", build_model)
    return reference_training(model(), [make(rank, num_steps) for rank in range(NUM_RANKS)], device, **options)


@pytest.mark.parametrize(
    ("stage", "way"),
    [(stage, way) for way in WAYS for stage in ([OF_ONE_STAGE[way]] if way in OF_ONE_STAGE else STAGES) if stage],
)
def test_two_ranks_train_as_one_process_with_the_stock_model(ranks, stage, way):
    device, results, _ = ranks
    runs = [result[stage][way] for result in results]
    assert_trained_as(reference_of(way, device, NUM_STEPS), runs, device)
    num_losses = FABRIC_RUNS[way][-1] if way in FABRIC_RUNS else 1
    for run in runs:
        assert run["num_replaced"] == 10 or (run["num_replaced"] > 10 and way == "adapted-tied")
        assert run["logit_counts"] == ((0, NUM_STEPS) if way == "whole-logits" else (num_losses * NUM_STEPS, 0))
        assert way != "planned" or run["plan"].startswith("all 2 layers stored")
        assert way != "uneven" or run["loss_scale"] == 1.0
        # The head's weight is there in the loss, and free after the step.
        assert way != "own-step" or run["is_free"] == [True] * NUM_STEPS
        assert way != "clipped" or min(run["norms"]) > MAX_NORM
        if way in FABRIC_RUNS:
            assert run["loaded_step"] == NUM_STEPS
            torch.testing.assert_close(run["loaded"], run["whole"], rtol=0.0, atol=0.0)


@each_stage
@pytest.mark.parametrize("way", ["fabric-labels", "fabric-logits"])
def test_heads_gradient_is_the_mean_over_ranks(ranks, stage, way):
    device, results, _ = ranks
    model = build_model(tied=way == "fabric-logits").to(device)
    for rank in range(NUM_RANKS):
        (batch,) = make_batches(rank, 1)
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        (loss / NUM_RANKS).backward()
    for result in results:
        found = result[stage][way]["head_gradients"][0]
        torch.testing.assert_close(found, model.lm_head.weight.grad.cpu(), rtol=TOLERANCE[device], atol=1e-6)


@each_stage
def test_logits_are_lazy_in_every_stage_with_a_loss_and_whole_in_predict(ranks, stage):
    for result in ranks.results:
        lazy = dict.fromkeys(("train", "val", "test"), LazyLogits)
        assert result[stage]["stages"]["kinds"] == {**lazy, "predict": torch.Tensor}
        assert result[stage]["stages"]["logit_counts"] == (6, 0)


@each_stage
def test_lower_precisions_train_fused(ranks, stage):
    device, results, _ = ranks
    precisions = results[0][stage]["precisions"]
    assert set(PRECISIONS[stage]) - set(precisions) <= ({"16-mixed"} if device == "cpu" else set())
    for precision in precisions:
        for result in ranks.results:
            run = result[stage][precision]
            assert (run["num_replaced"], run["logit_counts"]) == (10, (12, 0))
            assert run["losses"][-1] < run["losses"][0] - 0.3
            assert run["loss_scale"] == (2.0**16 if precision == "16-mixed" else 1.0)
            assert run["buffer_dtypes"] == {torch.float32}  # the rotary embedding's


@each_stage
def test_checkpoint_resumes(ranks, stage):
    device, results, _ = ranks
    both = reference_of("two-epochs", device, 4)
    for part, name in ((slice(0, 2), "first-epoch"), (slice(2, 4), "second-epoch")):
        for losses, result in zip(both.losses, results, strict=True):
            torch.testing.assert_close(result[stage][name]["losses"], losses[part], rtol=TOLERANCE[device], atol=0.0)
    for result in results:
        assert_same_parameters(result[stage]["second-epoch"]["whole"], both.parameters, 10 * TOLERANCE[device])


@each_stage
def test_checkpoint_becomes_one_file_that_the_stock_model_loads(ranks, tmp_path, stage):
    _, results, folder = ranks
    convert_zero_checkpoint_to_fp32_state_dict(folder / f"stage-{stage}.ckpt", tmp_path / "whole.ckpt")
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=False)["state_dict"]
    model = build_model()
    model.load_state_dict({name.removeprefix("model."): value for name, value in saved.items()})
    expected = results[0][stage]["first-epoch"]["whole"]
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0.0, atol=0.0)


def test_transformers_initializes_partitioned_parameters(ranks):
    first, second, *_ = (result["partitioned"]["from-config"]["whole"] for result in ranks.results)
    torch.testing.assert_close(second, first, rtol=0.0, atol=0.0)
    expected = build_model().state_dict()
    assert first.keys() == expected.keys()
    for name, parameter in expected.items():
        assert first[name].shape == parameter.shape
        if parameter.ndim == 1:
            assert torch.equal(first[name], parameter)
        else:
            assert first[name].std().item() == pytest.approx(0.02, rel=0.15)


def test_transformers_loads_a_checkpoint_into_partitioned_parameters(ranks):
    for result in ranks.results:
        torch.testing.assert_close(
            result["partitioned"]["from-pretrained"]["whole"], dict(build_model().state_dict()), rtol=0.0, atol=0.0
        )


# One process


@both_strategies
def test_strategy_names_the_extra_where_deepspeed_is_not_installed(monkeypatch, strategy):
    monkeypatch.setattr(tested, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-liger\[deepspeed\]'"):
        strategy()


@both_strategies
def test_device_that_deepspeed_does_not_run_on_is_refused(monkeypatch, strategy):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "device_name", lambda self, index=None: "xpu")
    made = strategy(parallel_devices=[torch.device("cpu")])
    with pytest.raises(RuntimeError, match=r"choose \['cpu'\], but DeepSpeed has chosen 'xpu': .* DS_ACCELERATOR"):
        made.setup_environment()


@both_strategies
def test_users_config_is_kept_and_not_written_to(strategy):
    config = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}
    made = strategy(config=config).config
    made["zero_optimization"]["stage"] = 2
    assert config == {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}
    assert made["gradient_clipping"] == 0.5
    assert FabricLigerDeepSpeedStrategy().config["gradient_clipping"] == 0.0  # DeepSpeed's own default is 1


def test_engine_that_keeps_gradients_to_itself_trains_on_means_of_micro_batches_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(LigerSingleDeviceStrategy, "handles_gradient_accumulation", True)
    recorder, module = Losses(), LM()
    trainer = make_trainer(recorder, root=tmp_path, strategy="liger", accumulate_grad_batches=2)
    with pytest.warns(UserWarning, match="LigerSingleDeviceStrategy gives no access to its gradients"):
        trainer.fit(module, make_loader(0, 2))
    assert 2 * recorder.losses[0] == pytest.approx(build_model()(**make_batches(0, 1)[0]).loss.item(), rel=1e-5)
    assert not module._normalizes_steps()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_rules_see_partitioned_parameters_whole_and_in_the_engines_dtype(dtype):
    shapes, model = {name: each.shape for name, each in build_model().named_parameters()}, build_model()
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    before = dict(model.named_parameters())
    config = {} if dtype is None else {"bf16": {"enabled": True}}
    with pytest.raises(ZeroDivisionError), _whole_parameters(model, config, torch.device("cpu")):
        shown = dict(model.named_parameters())
        1 / 0  # noqa: B018
    assert {name: (each.shape, each.dtype) for name, each in shown.items()} == {
        name: (shape, dtype or torch.float32) for name, shape in shapes.items()
    }
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


if __name__ == "__main__":
    rank_main(results)
