"""``LigerMonitor`` in a fit: its numbers, where they appear, and what it costs."""

import csv
import functools
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_liger import Float8Recipe, LigerMonitor, LigerSingleDeviceStrategy
from lightning_liger.hardware import GPUS
from lightning_liger.host_copy import HostCopy
from lightning_liger.monitor import callback as callback_module
from lightning_liger.monitor import clock as clock_module
from lightning_liger.strategies.parts.gradient_norm import gradient_norm
from tests.lightning_liger.strategies.workers.distributed import LM, make_batches, make_loader, make_trainer
from tests.lightning_liger.tiny import tiny_llama

TOKENS, NUM_BATCHES = 26, 8
PEAK = 1e12


class Clock(Callback):
    """Stands in for the time module: a batch takes two seconds, half of it waiting for data, validation a thousand."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def on_train_batch_end(self, *_) -> None:
        self.now += 1.0

    def on_validation_batch_end(self, *_) -> None:
        self.now += 1000.0

    def loader(self, num_batches=NUM_BATCHES):
        clock = self

        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return num_batches

            def __getitem__(self, index):
                clock.now += 1.0
                return make_batches(0, num_batches)[index]

        return DataLoader(Slow(), batch_size=None)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(clock_module, "time", clock)
    monkeypatch.setattr(callback_module, "measure_matmul_flops", lambda device, dtype: PEAK)
    return clock


def test_numbers_are_exact_in_loggers_results_bar_and_page(tmp_path, clock, capsys):
    shown = []

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, trainer, *args):
            super().on_train_batch_end(trainer, *args)
            shown.append(self.get_metrics(trainer, trainer.lightning_module))

    monitor, bar = LigerMonitor(every_n_steps=2, skip_steps=1), Bar()
    profiler = SimpleProfiler()
    trainer = make_trainer(
        clock, monitor, bar, root=tmp_path, accumulate_grad_batches=2, val_check_interval=4, gradient_clip_val=1e9,
        logger=CSVLogger(tmp_path, "log", version=""), enable_progress_bar=True, profiler=profiler,
    )  # fmt: skip
    trainer.fit(LM(), clock.loader(), make_loader(1, 1))

    flops = monitor._flops.of(TOKENS, [(13, 2)])
    results = monitor.results
    assert (results["steps"], results["tokens"], results["rows"]) == (4, 8 * TOKENS, 16)
    # Three of four steps are timed. The first batch's wait for data is left out, and so is that after validation.
    assert results["seconds"] == 6.0 + 4.0
    assert results["tokens_per_second"] == 6 * TOKENS / 10
    assert results["model_flops_utilization"] == pytest.approx(6 * flops / 10 / PEAK)
    assert results["data_wait_share"] == 4 / 10
    assert results["ignored_share"] == 2 / 26
    assert results["memory_peak_gib"] == monitor.points[-1]["memory_peak_gib"]

    with (tmp_path / "log" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["monitor/tokens"]]
    assert [row["step"] for row in rows] == ["1", "3"]
    assert [float(row["monitor/tokens"]) for row in rows] == [4 * TOKENS, 8 * TOKENS]
    assert float(rows[1]["monitor/tokens_per_second"]) == 4 * TOKENS / 7
    assert all(float(row["monitor/gradient_norm"]) > 0 for row in rows)
    assert not any(name.startswith("monitor") for name in trainer.callback_metrics)

    assert "tok/s" not in shown[2]
    assert shown[-1]["tok/s"] == f"{4 * TOKENS / 7:.4g}"
    assert shown[-1]["MFU"] == "0.0%"
    assert "get_metrics" not in vars(bar)
    assert trainer.profiler is profiler

    page = (tmp_path / "log" / "monitor.html").read_text()
    printed = capsys.readouterr().out
    for text in ("Model FLOPs utilization", "Waiting for data", "Gradient norm", "Ignored labels"):
        assert text in page
        assert text in printed


@pytest.mark.parametrize("scope", [False, "layers", "model"])
def test_products_in_float8_count_against_their_own_peak(tmp_path, clock, monkeypatch, capsys, scope):
    torch.compiler.reset()
    monkeypatch.setattr(callback_module, "_device", lambda trainer: ("GPU", PEAK, 2 * PEAK))
    build = functools.partial(tiny_llama, use_cache=False, num_hidden_layers=1)
    monitor, module = LigerMonitor(skip_steps=0), LM(build=lambda module: build())
    recipe = Float8Recipe(filter=["*"], min_tokens=1)
    strategy = LigerSingleDeviceStrategy(fp8=recipe, compile={"scope": scope, "backend": "aot_eager"})
    trainer = make_trainer(clock, monitor, root=tmp_path, strategy=strategy)
    trainer.fit(module, clock.loader(), make_loader(1, 1))  # validation is not in float8, and does not count
    layers = [each for name, each in module.named_modules() if isinstance(each, nn.Linear) and "lm_head" not in name]
    in_float8 = 6 * TOKENS * sum(layer.weight.numel() for layer in layers)
    flops = monitor._flops.of(TOKENS, [(13, 2)])
    assert 0 < in_float8 < flops
    utilization = ((flops - in_float8) / PEAK + in_float8 / (2 * PEAK)) / monitor.results["step_seconds"]
    assert monitor.results["model_flops_utilization"] == pytest.approx(utilization)
    assert monitor.results["fp8_share"] == monitor.points[-1]["fp8_share"] == 1.0
    assert "of 1 TFLOP/s, of 2 TFLOP/s in float8" in " ".join(capsys.readouterr().out.split())


def test_no_operator_runs_between_two_times(tmp_path, clock, monkeypatch):
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} ran")

        def __call__(self, hook):
            def refusing(*args):
                with self:
                    hook(*args)

            return refusing

    for name in ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"):
        monkeypatch.setattr(LigerMonitor, name, Refusing()(getattr(LigerMonitor, name)))
    batches = [{**batch, "attention_mask": torch.ones(2, 13)} for batch in make_batches(0, 4)]
    monitor = LigerMonitor(every_n_steps=50, skip_steps=0)
    make_trainer(monitor, root=tmp_path).fit(LM(), DataLoader(batches, batch_size=None))
    assert monitor.results["tokens"] == 4 * TOKENS


def test_each_time_is_one_copy_to_the_host(tmp_path, clock, monkeypatch):
    copy = Mock(side_effect=HostCopy)
    monkeypatch.setattr(callback_module, "HostCopy", copy)
    monitor = LigerMonitor(every_n_steps=1, skip_steps=0)
    make_trainer(monitor, root=tmp_path).fit(LM(), make_loader(0, 4))
    assert all({"loss", "gradient_norm"} < point.keys() for point in monitor.points)
    assert len(monitor.points) == copy.call_count == 4


def test_batches_without_tokens_count_rows(tmp_path, clock, capsys):
    monitor = LigerMonitor(every_n_steps=1, skip_steps=0)
    make_trainer(clock, monitor, root=tmp_path, limit_train_batches=3).fit(BoringModel())
    results = monitor.results
    assert (results["rows"], results["tokens"]) == (3, 0)
    assert results["rows_per_second"] == 3 / 3.0
    assert "model_flops_utilization" not in results
    assert "Rows/s" in capsys.readouterr().out
    assert "Rows per second" in (tmp_path / "monitor.html").read_text()


def test_numbers_go_on_after_resuming_and_start_again_with_another_training(tmp_path, clock):
    class Saving(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "3.ckpt")

    def fit(monitor, max_steps, ckpt_path=None):
        trainer = make_trainer(clock, monitor, Saving(), root=tmp_path, max_steps=max_steps)
        trainer.fit(LM(), make_loader(0, 6), ckpt_path=ckpt_path)

    first = LigerMonitor(every_n_steps=2, skip_steps=1)
    fit(first, 3)
    state = torch.load(tmp_path / "3.ckpt", weights_only=True)["callbacks"]["LigerMonitor"]  # between two times
    assert (state["totals"]["tokens"], state["totals"]["steps"]) == (3 * TOKENS, 3)
    resumed = LigerMonitor(every_n_steps=2, skip_steps=1)
    fit(resumed, 5, tmp_path / "3.ckpt")
    assert (resumed.results["steps"], resumed.results["tokens"]) == (5, 5 * TOKENS)
    assert [point["step"] for point in resumed.points] == [1, 4]
    assert resumed.results["seconds"] == 2.0 + 1.0  # one step is left out at each start
    assert first.results["tokens"] == 3 * TOKENS
    fit(first, 2)
    assert (first.results["steps"], first.results["tokens"]) == (2, 2 * TOKENS)
    trainer = make_trainer(clock, first, root=tmp_path)
    for epoch in (1, 2):  # the second fit goes on
        trainer.fit_loop.max_epochs = epoch
        trainer.fit(LM(), make_loader(0, 6))
        assert (first.results["steps"], first.results["tokens"]) == (6 * epoch, 6 * epoch * TOKENS)


def test_num_tokens_is_without_padding_since_training_began(tmp_path, clock):
    batches = make_batches(0, 6)
    for number, batch in enumerate(batches):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, : number + 1] = 0

    class Saving(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 3:
                trainer.save_checkpoint(tmp_path / "2.ckpt")

    found = []
    for name, ckpt_path in (("first", None), ("resumed", tmp_path / "2.ckpt")):
        trainer = make_trainer(
            clock, LigerMonitor(every_n_steps=1, skip_steps=0), Saving(), root=tmp_path, accumulate_grad_batches=2,
            max_steps=2 if ckpt_path is None else 3, logger=CSVLogger(tmp_path, name, version=""),
        )  # fmt: skip
        trainer.fit(LM(), DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
        with (tmp_path / name / "metrics.csv").open() as file:
            found += [float(row["num_tokens"]) for row in csv.DictReader(file) if row.get("num_tokens")]
    # This loader cannot resume: it gives its first batches again.
    assert found == [2 * TOKENS - 3, 4 * TOKENS - 10, 6 * TOKENS - 13]


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_an_interrupted_training_keeps_the_open_lap(tmp_path, clock, error):
    class Failing(Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            if trainer.global_step == 5:
                raise error

    monitor = LigerMonitor(every_n_steps=4, skip_steps=1)
    trainer = make_trainer(clock, monitor, Failing(), root=tmp_path)
    with pytest.raises((RuntimeError, SystemExit)):
        trainer.fit(LM(), clock.loader())
    assert not {"start", "stop"} & vars(trainer.profiler).keys()
    found = [monitor.results[name] for name in ("steps", "tokens", "seconds")]
    assert found == [5, 5 * TOKENS, 4 * 2.0]  # without the step that failed
    assert [point["step"] for point in monitor.points] == [3]
    assert (tmp_path / "monitor.html").is_file()


@pytest.mark.parametrize("arrives", [False, None])
def test_a_broken_device_neither_hides_the_error_nor_is_waited_for(tmp_path, clock, monkeypatch, arrives):
    class Copy(HostCopy):
        arrives = True

        def has_arrived(self):
            if self.arrives is None:
                raise RuntimeError("device lost again")
            return self.arrives

    class Failing(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 3:
                monkeypatch.setattr(Copy, "arrives", arrives)
                raise RuntimeError("device lost")

    monkeypatch.setattr(callback_module, "HostCopy", Copy)
    monkeypatch.setattr(callback_module, "_PATIENCE", 0.02)
    monitor = LigerMonitor(every_n_steps=2, skip_steps=0, page="a/monitor.html")
    with warnings.catch_warnings(record=True) as caught, pytest.raises(RuntimeError, match=r"^device lost$"):
        warnings.simplefilter("always")
        make_trainer(monitor, Failing(), root=tmp_path).fit(LM(), make_loader(0, 5))
    told = [str(each.message) for each in caught if "LigerMonitor" in str(each.message)]
    assert [each.partition(": ")[2] for each in told] == ["RuntimeError: device lost again"] * (arrives is None)
    assert (monitor.results["steps"], monitor.results["tokens"]) == (2, 2 * TOKENS)
    assert (tmp_path / "a" / "monitor.html").is_file()


def test_the_page_goes_to_urls_of_fsspec(tmp_path, clock, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_trainer(LigerMonitor(1, 0), root="memory://of-the-monitor/run").fit(LM(), make_loader(0, 2))
    with fsspec.open("memory://of-the-monitor/run/monitor.html", encoding="utf-8", mode="r") as file:
        assert "Gradient norm" in file.read()
    assert "memory://of-the-monitor/run/monitor.html" in capsys.readouterr().out.replace("\n", "")
    monitor = LigerMonitor(1, 0, page="unheard://of/page.html")
    with pytest.warns(UserWarning, match=r"LigerMonitor could not write unheard://of/page.html: \w+: .*unheard"):
        make_trainer(monitor, root=tmp_path).fit(LM(), make_loader(0, 2))
    assert monitor.results["steps"] == 2
    assert "Page" not in monitor.rows()


def test_device_is_known_or_measured(monkeypatch):
    gpu, name_of_h100 = GPUS["h100-80gb"], "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(callback_module, "measure_matmul_flops", lambda device, dtype: (device.type, dtype))
    for name, precision, module, expected in (
        (name_of_h100, "bf16-mixed", Unusual(), (gpu.name, gpu.bfloat16_flops, gpu.float8_flops)),
        (name_of_h100, "64-true", Unusual(), (name_of_h100, *[("cuda", torch.float64)] * 2)),
        (name_of_h100, "32-true", Unusual(), (gpu.name, gpu.float32_flops, gpu.float8_flops)),
        (
            name_of_h100,
            "32-true",
            Unusual().bfloat16(),
            (gpu.name, gpu.bfloat16_flops, gpu.float8_flops),
        ),  # which stays
        ("Another GPU", "16-true", Unusual(), ("Another GPU", *[("cuda", torch.float16)] * 2)),
        ("", "32-true", LM(), ("cpu process", *[("cpu", torch.float32)] * 2)),
    ):
        properties = SimpleNamespace(name=name, total_memory=gpu.memory_bytes)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        strategy = SimpleNamespace(root_device=torch.device("cuda" if name else "cpu"))
        trainer = SimpleNamespace(strategy=strategy, precision=precision, is_global_zero=True, lightning_module=module)
        assert callback_module._device(trainer) == expected


def test_short_trainings_are_logged_more_often(tmp_path, clock):
    every = []

    class Note(Callback):
        def on_train_batch_start(self, trainer, *_):
            every.append(monitor._every)
            trainer.should_stop = True

    for options, expected in (
        ({"log_every_n_steps": 10, "max_steps": 100}, 5),
        ({"log_every_n_steps": 10, "max_steps": 1000, "max_epochs": None}, 10),
        ({"log_every_n_steps": 0}, 1),
    ):
        monitor = LigerMonitor(page=None)
        make_trainer(monitor, Note(), root=tmp_path, **{"max_epochs": 50, **options}).fit(LM(), make_loader(0, 2))
        assert every[-1] == expected, options


class Unusual(BoringModel):
    """Token ids through an embedding and a layer, trained in unusual ways."""

    def __init__(self, is_manual=False):
        super().__init__()
        self.automatic_optimization = not is_manual
        self.model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.model(batch["input_ids"]).abs().square().mean()
        self.losses.append(loss.item())
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def _fit(root, module, *callbacks, takes_norm=True, **options):
    batches = [{"input_ids": torch.zeros(2, 5, dtype=torch.int64)} for _ in range(4)]
    monitor = LigerMonitor(every_n_steps=1, skip_steps=0, gradient_norm=takes_norm)
    make_trainer(monitor, *callbacks, root=root, **options).fit(module, DataLoader(batches, batch_size=None))
    return monitor


def test_the_loss_is_that_of_the_batch_under_accumulation_and_may_be_none(tmp_path, clock):
    module, norms = Unusual(), []

    class Norms(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            grads = [each.grad for each in pl_module.parameters() if each.grad is not None]
            norms.append(torch.nn.utils.get_total_norm(grads).item())

    monitor = _fit(tmp_path, module, Norms(), accumulate_grad_batches=2)
    assert [point["loss"] for point in monitor.points] == pytest.approx(module.losses[1::2])
    assert [point["gradient_norm"] for point in monitor.points] == pytest.approx(norms)
    monitor = _fit(tmp_path, Unusual(is_manual=True))
    assert [point["step"] for point in monitor.points] == [0, 1, 2, 3]
    assert all("loss" not in point and point["gradient_norm"] > 0 for point in monitor.points)


def test_norms_are_those_of_gradients_of_any_kind():
    gradients = [torch.randn(2, 3), torch.randn(4, dtype=torch.complex64), torch.randn(5).double(), None]
    gradients.append(torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), torch.randn(3, 2), (4, 2)))
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.data = parameter.data if gradient is None else torch.zeros_like(gradient.to_dense())
        parameter.grad = gradient
    expected = sum(each.to_dense().abs().square().sum().double() for each in gradients if each is not None).sqrt()
    found = gradient_norm(torch.nn.Module(), parameters, torch.device("cpu"))
    assert (found.dtype, found.item()) == (torch.float64, pytest.approx(expected.item()))


def test_a_fast_run_leaves_no_page_and_norms_can_be_left_out(tmp_path, clock):
    monitor = _fit(tmp_path, Unusual(), fast_dev_run=2, takes_norm=False)
    assert monitor.results["steps"] == 2
    assert not any("gradient_norm" in point for point in monitor.points)
    assert not (tmp_path / "monitor.html").exists()
