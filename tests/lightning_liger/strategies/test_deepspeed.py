"""``liger_deepspeed_stage_2`` and ``_3``: two processes under DeepSpeed against one with the stock model."""

import functools
from importlib.util import find_spec

import pytest
import torch
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

from lightning_liger import (
    FabricLigerDeepSpeedStrategy,
    LazyLogits,
    LigerDeepSpeedStrategy,
    LigerSingleDeviceStrategy,
    apply_liger_kernels,
)
from lightning_liger.strategies import deepspeed
from lightning_liger.strategies.deepspeed import _whole_parameters
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    NUM_RANKS,
    Losses,
    build_model,
    launch,
    make_batches,
    make_loader,
    make_trainer,
    make_uneven_batches,
    regularized,
)
from tests.lightning_liger.strategies.workers.trainings import TOLERANCE, assert_trained_as, reference_training

STRATEGIES = {"trainer": LigerDeepSpeedStrategy, "fabric": FabricLigerDeepSpeedStrategy}
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
of_each_stage = pytest.mark.parametrize("stage", [2, 3])


# Two processes


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def launched(request, tmp_path_factory):
    """The device, the folder, what both ranks got out of every run, and the module that ran them."""
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    from tests.lightning_liger.strategies.workers import deepspeed as worker

    folder = tmp_path_factory.mktemp("ranks")
    build_model().save_pretrained(folder / worker.PRETRAINED)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DS_ACCELERATOR", request.param)
        results = launch(request.param, folder, timeout=280.0, worker=worker.__name__)
    return request.param, folder, results, worker


def of_two_epochs(rank, num_batches):
    return 2 * make_batches(rank, num_batches // 2)


UNEVEN = {"make": make_uneven_batches, "num_micro_batches": 2}
MEAN_OF_RANKS = {"of_tokens": False}
WAYS = {
    "untied": {},
    "tied": {"tied": True},
    "by-name": {},
    "recomputed": {},
    "planned": UNEVEN,
    "uneven": {**UNEVEN, "change": regularized},
    "clipped": {"num_micro_batches": 2, "max_norm": 0.5},
    "fabric-labels": MEAN_OF_RANKS,
    "fabric-logits": {"tied": True, **MEAN_OF_RANKS},
    "fabric-scores": MEAN_OF_RANKS,
    "unfinished": {"make": of_two_epochs, "num_micro_batches": 2},
    "partitioned-untied": {},
    "partitioned-tied": {"tied": True},
    "own-step": MEAN_OF_RANKS,
}
"""What is trained, and how one process does it."""
OF_ONE_STAGE = {
    "unfinished": 2,
    "by-name": 3,
    "recomputed": 3,
    "planned": 3,
    **dict.fromkeys(("partitioned-untied", "partitioned-tied", "own-step"), "partitioned"),
}


@functools.cache
def reference_of(way, device, num_steps):
    options = dict(WAYS[way])
    make, model = options.pop("make", make_batches), build_model(options.pop("tied", False))
    return reference_training(model, [make(rank, num_steps) for rank in range(NUM_RANKS)], device, **options)


@pytest.mark.parametrize(
    ("stage", "way"),
    [(stage, way) for way in WAYS for stage in ([OF_ONE_STAGE[way]] if way in OF_ONE_STAGE else (2, 3))],
)
def test_two_ranks_train_as_one_process_with_the_stock_model(launched, stage, way):
    device, _, results, worker = launched
    runs = [result[stage][way] for result in results]
    assert_trained_as(reference_of(way, device, worker.NUM_STEPS), runs, device)
    num_losses = worker.FABRIC_RUNS[way][-1] if way in worker.FABRIC_RUNS else 1
    for run in runs:
        assert (run["num_replaced"], run["logit_counts"]) == (10, (num_losses * worker.NUM_STEPS, 0))
        assert way != "planned" or run["plan"].startswith("all 2 layers stored")
        assert way != "uneven" or run["loss_scale"] == 1.0
        # The head's weight is there in the loss, and free after the step.
        assert way != "own-step" or run["is_free"] == [True] * worker.NUM_STEPS
        assert way != "clipped" or min(run["norms"]) > worker.MAX_NORM
        if way in worker.FABRIC_RUNS:
            assert run["loaded_step"] == worker.NUM_STEPS
            torch.testing.assert_close(run["loaded"], run["whole"], rtol=0.0, atol=0.0)


@of_each_stage
@pytest.mark.parametrize("way", ["fabric-labels", "fabric-logits"])
def test_heads_gradient_is_the_mean_over_ranks(launched, stage, way):
    device, _, results, _ = launched
    model = build_model(tied=way == "fabric-logits").to(device)
    for rank in range(NUM_RANKS):
        (batch,) = make_batches(rank, 1)
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        (loss / NUM_RANKS).backward()
    for result in results:
        found = result[stage][way]["head_gradients"][0]
        torch.testing.assert_close(found, model.lm_head.weight.grad.cpu(), rtol=TOLERANCE[device], atol=1e-6)


@of_each_stage
def test_logits_are_lazy_in_every_stage_with_a_loss_and_whole_in_predict(launched, stage):
    for result in launched[2]:
        lazy = dict.fromkeys(("train", "val", "test"), LazyLogits)
        assert result[stage]["stages"]["kinds"] == {**lazy, "predict": torch.Tensor}
        assert result[stage]["stages"]["logit_counts"] == (6, 0)


@of_each_stage
def test_lower_precisions_train_fused(launched, stage):
    device, _, results, worker = launched
    precisions = results[0][stage]["precisions"]
    assert set(worker.PRECISIONS[stage]) - set(precisions) <= ({"16-mixed"} if device == "cpu" else set())
    for precision in precisions:
        for result in launched[2]:
            run = result[stage][precision]
            assert (run["num_replaced"], run["logit_counts"]) == (10, (12, 0))
            assert run["losses"][-1] < run["losses"][0] - 0.3
            assert run["loss_scale"] == (2.0**16 if precision == "16-mixed" else 1.0)
            assert run["buffer_dtypes"] == {torch.float32}  # the rotary embedding's


@of_each_stage
def test_checkpoint_resumes(launched, stage):
    for result in launched[2]:
        runs = result[stage]
        assert runs["first-epoch"]["losses"] == runs["two-epochs"]["losses"][:2]
        assert runs["second-epoch"]["losses"] == pytest.approx(runs["two-epochs"]["losses"][2:], rel=1e-6)
        torch.testing.assert_close(runs["second-epoch"]["whole"], runs["two-epochs"]["whole"], rtol=0.0, atol=1e-6)


@of_each_stage
def test_checkpoint_becomes_one_file_that_the_stock_model_loads(launched, tmp_path, stage):
    _, folder, results, _ = launched
    convert_zero_checkpoint_to_fp32_state_dict(folder / f"stage-{stage}.ckpt", tmp_path / "whole.ckpt")
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=False)["state_dict"]
    model = build_model()
    model.load_state_dict({name.removeprefix("model."): value for name, value in saved.items()})
    for name, parameter in results[0][stage]["first-epoch"]["whole"].items():
        torch.testing.assert_close(model.state_dict()[name], parameter, rtol=0.0, atol=0.0)


def test_transformers_initializes_partitioned_parameters(launched):
    first, *others = (result["partitioned"]["from-config"]["whole"] for result in launched[2])
    for other in others:
        torch.testing.assert_close(other, first, rtol=0.0, atol=0.0)
    expected = build_model().state_dict()
    assert first.keys() == expected.keys()
    for name, parameter in expected.items():
        assert first[name].shape == parameter.shape
        if parameter.ndim == 1:
            assert torch.equal(first[name], parameter)
        else:
            assert first[name].std().item() == pytest.approx(0.02, rel=0.15)


def test_transformers_loads_a_checkpoint_into_partitioned_parameters(launched):
    for result in launched[2]:
        torch.testing.assert_close(
            result["partitioned"]["from-pretrained"]["whole"], dict(build_model().state_dict()), rtol=0.0, atol=0.0
        )


@pytest.mark.parametrize("way", ["frozen-head", "adapted-tied", "whole-logits"])
def test_partitioned_models_train_as_without_kernels(launched, way):
    tolerance = TOLERANCE[launched[0]]
    for result in launched[2]:
        ours, stock = (result["partitioned"][name] for name in (way, f"stock-{way}"))
        assert stock["num_replaced"] == 0
        assert ours["num_replaced"] >= 10
        assert ours["logit_counts"] == ((0, 4) if way == "whole-logits" else (4, 0))
        torch.testing.assert_close(ours["losses"], stock["losses"], rtol=tolerance, atol=0.0)
        torch.testing.assert_close(ours["whole"], stock["whole"], rtol=0.0, atol=10 * tolerance)


# One process


@pytest.mark.parametrize("engine", STRATEGIES)
def test_strategy_names_the_extra_where_deepspeed_is_not_installed(monkeypatch, engine):
    monkeypatch.setattr(deepspeed, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-liger\[deepspeed\]'"):
        STRATEGIES[engine]()


@needs_deepspeed
@pytest.mark.parametrize("engine", STRATEGIES)
def test_device_that_deepspeed_does_not_run_on_is_refused(monkeypatch, engine):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "device_name", lambda self, index=None: "xpu")
    strategy = STRATEGIES[engine](parallel_devices=[torch.device("cpu")])
    with pytest.raises(RuntimeError, match=r"choose \['cpu'\], but DeepSpeed has chosen 'xpu': .* DS_ACCELERATOR"):
        strategy.setup_environment()


@needs_deepspeed
@pytest.mark.parametrize("engine", STRATEGIES)
def test_users_config_is_kept_and_not_written_to(engine):
    config = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}
    made = STRATEGIES[engine](config=config).config
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


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_rules_see_partitioned_parameters_whole_and_in_the_engines_dtype(tied, dtype):
    whole, partitioned = build_model(tied), build_model(tied)
    for parameter in partitioned.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    before = dict(partitioned.named_parameters())
    config = {} if dtype is None else {"bf16": {"enabled": True}}
    with _whole_parameters(partitioned, config, torch.device("cpu")):
        shown = dict(partitioned.named_parameters())
        report = apply_liger_kernels(partitioned)
    assert {parameter.dtype for parameter in shown.values()} == {dtype or torch.float32}
    assert {name: parameter.shape for name, parameter in shown.items()} == {
        name: parameter.shape for name, parameter in whole.named_parameters()
    }
    with pytest.raises(ZeroDivisionError), _whole_parameters(partitioned, config, torch.device("cpu")):
        1 / 0  # noqa: B018
    after = dict(partitioned.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    if dtype is not None:
        whole.to(dtype)
    assert report.as_dict() == apply_liger_kernels(whole).as_dict()
