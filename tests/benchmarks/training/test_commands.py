"""``python -m benchmarks`` with the commands of whole models, in this process, on tiny sizes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import docs_sections
from benchmarks.__main__ import main
from benchmarks.records import read_results
from benchmarks.training import estimates, examples, monitor, seeds, worker
from benchmarks.training.convergence import Curve, distances
from benchmarks.training.dims import DIMS
from benchmarks.training.job import OK, OUT_OF_MEMORY, Job, Row
from benchmarks.training.processes import run_jobs
from benchmarks.training.train import ratio
from lightning_liger.cli import LigerCLI
from lightning_liger.estimate.states import PRECISIONS

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
TINY = Job("llama3_8b", "ours", ((2, 16), (4, 8)), tiny=True, warm_up=1, steps=2)


def rows_of(path: Path) -> list[Row]:
    return [Row.from_json(line) for line in read_results(path).lines]


@without_gpu
def test_train_compares_arms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--arms", "hf:full,hf:none,ours", "--batches", "2,4", "--steps", "2", "--warm-up", "1"]
    assert main(["train", "--quick", *arguments, "--out", str(tmp_path / "mine")]) == 0
    results = read_results(tmp_path / "mine.jsonl")
    assert results.command == "train"
    assert {"date", "device", "torch", "liger-kernel"} <= set(results.environment)
    rows = rows_of(tmp_path / "mine.jsonl")
    assert [(row.arm, row.batch_size) for row in rows] == [
        (arm, size) for arm in ("hf:full", "hf:none", "ours") for size in (2, 4)
    ]
    for row in rows:
        assert row.status == OK
        assert len(row.step_seconds) == 2
        assert len(row.losses) == 3
        assert row.parameters_gib > 0
        assert row.optimizer_gib >= 2 * row.parameters_gib  # AdamW
    # The same weights and batches in every arm.
    assert rows[0].losses == pytest.approx(rows[2].losses, rel=1e-5)
    assert rows[0].losses == pytest.approx(rows[4].losses, rel=1e-3)
    printed = capsys.readouterr().out
    assert "Hugging Face, layers recomputed" in printed
    assert "1.000x" in printed


@without_gpu
def test_train_splits_experts_over_gpus_and_trains_adapters_of_them(tmp_path: Path) -> None:
    settings = ["train", "--quick", "--model", "qwen3_30b_a3b", "--steps", "2", "--warm-up", "1"]
    arms = "hf_fsdp2:full,ours_fsdp2:full,ours_fsdp2_ep:none"
    sharded = ["--devices", "2", "--arms", arms, "--optimizer", "adamw_bfloat16", "--out", str(tmp_path / "sharded")]
    adapted = ["--lora-rank", "2", "--arms", "hf:none,ours:none", "--out", str(tmp_path / "adapted")]
    assert [main([*settings, *each]) for each in (sharded, adapted)] == [0, 0]
    rows = rows_of(tmp_path / "sharded.jsonl")
    assert [(row.arm, row.status, row.optimizer) for row in rows] == [
        (arm, OK, "adamw_bfloat16") for arm in arms.split(",")
    ]
    for row in rows:
        assert row.losses == pytest.approx(rows[0].losses, rel=2e-3)
        assert row.optimizer_gib == pytest.approx(2 * row.parameters_gib, rel=1e-2)
    plain, ours = rows_of(tmp_path / "adapted.jsonl")
    assert ours.losses == pytest.approx(plain.losses, rel=2e-3)
    assert ours.optimizer_gib == pytest.approx(plain.optimizer_gib, rel=1e-2)
    assert ours.optimizer_gib < 0.5 * ours.parameters_gib  # adapters only


@without_gpu
def test_context_measures_lengths_and_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--arms", "ours", "--lengths", "16,32", "--warm-up", "0", "--optimizer", "sgd"]
    assert main(["context", "--quick", *arguments, "--out", f"{tmp_path}/"]) == 0
    results = read_results(tmp_path / "context.jsonl")
    assert [line["attention"]["sequence_length"] for line in results.lines[:2]] == [16, 32]
    assert [line["sequence_length"] for line in results.lines[2:]] == [16, 32]
    assert {line["status"] for line in results.lines[2:]} == {OK}
    assert "states are parameters" in capsys.readouterr().out


@without_gpu
def test_medusa_trains_the_same_heads_in_every_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--arms", "hf:none,ours:none", "--heads", "2", "--lengths", "8,16", "--layers", "2"]
    assert main(["medusa", "--quick", *arguments, "--out", f"{tmp_path}/"]) == 0
    rows = rows_of(tmp_path / "medusa.jsonl")
    assert [(row.medusa_stage, row.arm, row.sequence_length, row.status) for row in rows] == [
        (stage, arm, length, OK) for stage in (1, 2) for arm in ("hf:none", "ours:none") for length in (8, 16)
    ]
    for stage in (1, 2):
        plain, other = (
            [row.losses for row in rows if (row.medusa_stage, row.arm) == (stage, arm)]
            for arm in ("hf:none", "ours:none")
        )
        assert other == [pytest.approx(losses, rel=1e-3) for losses in plain]
    heads, model = rows[0].optimizer_gib, rows[-1].optimizer_gib
    assert heads < model == pytest.approx(2 * rows[-1].parameters_gib, rel=1e-3)  # AdamW, of the heads only in stage 1
    assert "stage" in capsys.readouterr().out
    section = docs_sections.medusa(tmp_path / "medusa.jsonl")
    assert "\n| stage | heads | implementation | 8 | 16 |\n" in section
    assert section.count(" | lightning-liger | ") == 2


@without_gpu
def test_examples_are_measured_through_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it goes elsewhere; this brings it back
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    record = examples.measure("distill_topk", quick=True, steps=2, batch_size=4)
    assert (record["module"], record["steps"]) == ("LigerDistillation", 2)
    assert record["tokens_per_second"] > 0
    assert record["last_loss"] != record["first_loss"]
    loop = examples.measure("fabric_loop", quick=True, steps=2, batch_size=4)
    assert (loop["module"], loop["tokens_per_step"]) == ("Fabric", 512)
    assert loop.keys() == record.keys()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    ids = torch.zeros(2, 3)
    assert examples.num_tokens({"input_ids": ids}) == 6  # padding is not counted
    assert examples.num_tokens({"input_ids": ids, "attention_mask": mask, "KL_attention_mask": mask}) == 10
    assert examples.num_tokens({"prompt_mask": mask, "completion_mask": mask[:, :2]}) == 9


@pytest.mark.parametrize("name", ["pretrain", "multi_node", "long_context", "vision_language", "distill"])
def test_examples_take_their_settings_of_real_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(examples.ROOT)
    monkeypatch.setattr("sys.argv", ["pytest"])
    settings = [f"--{key}={json.dumps(value)}" for key, value in examples.EXAMPLES[name]().items()]
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.callbacks=[]"]
    cli = LigerCLI(args=[f"--config=examples/{name}.yaml", *settings, *options], run=False)
    assert cli.model.config.get_text_config().hidden_size == 2048


@without_gpu
def test_optimizer_measures_each_implementation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimizer", "--quick", "--layers", "1", "--out", str(tmp_path)]) == 0
    results = read_results(tmp_path / "optimizer.jsonl")
    assert results.command == "optimizer"
    found = {(line["contender"], line["dtype"]): line for line in results.lines}
    assert found.keys() == {(name, kind) for name in ("foreach", "fused", "ours") for kind in ("bfloat16", "float32")}
    assert all(line["step_ms"] > 0 and line["layers"] == 1 for line in results.lines)
    assert "multiple of the floor" in capsys.readouterr().out


@without_gpu
def test_host_measures_whole_small_steps_of_each_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "llama3_1b", "--arms", "hf,ours,ours_compiled,ours_captured"]
    assert main(["host", "--quick", *arguments, "--layers", "1", "--steps", "2", "--out", f"{tmp_path}/"]) == 1
    rows = {row.arm: row for row in rows_of(tmp_path / "host.jsonl")}
    captured = rows.pop("ours_captured")
    assert (captured.status, "needs a CUDA GPU" in captured.error) == ("failed", True)
    assert all((row.status, len(row.step_seconds)) == (OK, 2) for row in rows.values())
    assert all(row.losses == pytest.approx(rows["hf"].losses, rel=1e-3) for row in rows.values())
    assert rows["ours_compiled"].first_step_seconds > rows["hf"].first_step_seconds > 0
    assert "layers in CUDA graphs" in capsys.readouterr().out


def test_activations_counts_what_layers_keep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["activations", "--quick", "--model", "llama3_8b", "--out", str(tmp_path)]) == 0
    found = {line["contender"]: line["bytes_per_token"] for line in read_results(tmp_path / "activations.jsonl").lines}
    # A layer keeps its input and the inputs of its matrix products at least: 2 of 64, two of 96 and more, in bfloat16.
    assert found["eager"] > 2 * (2 * 64 + 2 * 96)
    assert found["cheap"] == found["store"]  # without a GPU no kernel runs whose outputs can be made again
    assert "relative to all stored" in capsys.readouterr().out


def test_monitor_is_measured_next_to_fits_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert monitor.main(["--quick", "--out", str(tmp_path / "monitor.jsonl")]) in (0, 1)
    _, *lines = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    assert [(line["layers"], line["tokens"], line["every"]) for line in lines] == [(2, 16, 2), (2, 16, 4)]
    assert lines[0]["without_ms"] == lines[1]["without_ms"] != lines[1]["with_ms"]
    assert all(line["host_ms"] > 0 for line in lines)
    assert "2 x 16" in capsys.readouterr().out
    small, large = ({**lines[0], "tokens": tokens, "without_ms": [10.0, 10.0]} for tokens in (16, 32))
    assert monitor.status([{**small, "host_ms": 9.0}, {**large, "host_ms": 0.049}]) == 0
    assert monitor.status([{**small, "host_ms": 0.0}, {**large, "host_ms": 0.05}]) == 1


@without_gpu
def test_packing_counts_tokens_and_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["packing", "--quick", "--out", str(tmp_path / "mine")]) == 0
    padded, grouped, free, packed = read_results(tmp_path / "mine.jsonl").lines
    assert padded["tokens"] < 0.8 * padded["places"]
    assert padded["tokens"] / padded["places"] < grouped["tokens"] / grouped["places"]
    assert free["tokens"] == free["places"]
    assert 0.9 * 2 * 3 * 32 < packed["tokens"] == packed["places"] <= 2 * 3 * 32


@without_gpu
def test_convergence_compares_runs_on_the_same_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["convergence", "--quick", "--only", "phi3", "--plans", "kernels", "--out", f"{tmp_path}/"]) == 0
    lines = read_results(tmp_path / "convergence.jsonl").lines
    curves = [Curve(**line["curve"]) for line in lines if "curve" in line]
    assert [curve.run for curve in curves] == ["stock", "stock, rows reversed", "stock, two micro-batches", "kernels"]
    assert "multiple of the noise" in " ".join(capsys.readouterr().out.split())
    rows = [Row.from_json(line) for line in lines if "curve" not in line]
    assert [(row.arm, row.permute_rows) for row in rows] == [("hf", False), ("hf", True), ("ours", False)]
    assert rows[1].losses == pytest.approx(rows[0].losses, rel=1e-5)
    assert rows[2].losses == pytest.approx(rows[0].losses, rel=1e-3)
    assert len(set(rows[0].losses)) == 3


@without_gpu
def test_convergence_over_seeds_adds_the_runs_that_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["convergence", "--quick", "--seeds-arms", "ours,ours_fp8", "--out", str(tmp_path / "mine")]
    assert main([*command, "--seeds", "2", "--seconds", "0"]) == 1
    assert "6 of 6 runs are missing" in capsys.readouterr().out
    for num_seeds in (1, 2):
        assert main([*command, "--seeds", str(num_seeds)]) == 0
    rows = rows_of(tmp_path / "mine.jsonl")
    runs = [("ours", False), ("ours_fp8", False), ("ours", True)]
    assert [(row.seed, row.arm, row.permute_rows) for row in rows] == [
        (seed, *run) for seed in (0, 100) for run in runs
    ]
    plain, other = rows[0].held_out_loss, rows[3].held_out_loss
    assert [row.held_out_loss for row in rows[1:3]] == pytest.approx([plain, plain], rel=1e-3)
    assert other != pytest.approx(plain, rel=1e-4)
    assert [row.fp8_share for row in rows[:3]] == [None, 1.0, None]
    assert docs_sections._arm(rows[1], {"liger-kernel": "1"}) == "`liger_fp8`"
    assert " yes " in capsys.readouterr().out


def test_differences_over_seeds_have_an_interval() -> None:
    found = seeds.Difference.of([0.01, 0.02, 0.03])
    assert found.mean == pytest.approx(0.02)
    assert found.half_width == pytest.approx(4.303 * 0.01 / 3**0.5)
    assert found.lies_within(0.045)
    assert not found.lies_within(0.044)
    assert not seeds.Difference.of([0.0]).lies_within(1.0)


def test_batches_of_ranks_differ_unless_they_share_sequences() -> None:
    def first(rank: int, **changes: Any) -> torch.Tensor:
        return next(iter(worker.Feed(dataclasses.replace(TINY, devices=2, **changes), rank)))["input_ids"]

    assert not torch.equal(first(0), first(1))
    assert torch.equal(first(0, context_parallel_size=2), first(1, context_parallel_size=2))
    assert torch.equal(first(0, permute_rows=True), first(0).flip(0))


def test_noise_is_how_far_stock_runs_drift() -> None:
    runs = {
        "stock": [4.0, 3.0],
        "stock, rows reversed": [4.0, 3.1],
        "stock, two micro-batches": [4.0, 3.0],
        "kernels": [4.3, 3.4],
    }
    noise, found = distances([Curve("llama", "float32", run, losses) for run, losses in runs.items()])
    assert noise == pytest.approx(0.1 / 2**0.5)
    assert found == {"kernels": pytest.approx((0.25 / 2) ** 0.5)}
    same = [Curve("llama", "bfloat16", run, [4.0]) for run in runs]
    assert distances(same) == (4.0 * 2**-7, {"kernels": 0.0})


@without_gpu
def test_arms_that_fail_or_run_out_of_memory_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    step = worker.BenchmarkLM.training_step

    def training_step(self: worker.BenchmarkLM, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if len(batch["input_ids"]) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(worker.BenchmarkLM, "training_step", training_step)
    job = dataclasses.replace(TINY, shapes=((2, 16), (4, 16), (8, 16)))
    first, second = run_jobs([job], in_process=True)
    assert (first.status, first.batch_size) == (OK, 2)
    assert (second.status, second.batch_size) == (OUT_OF_MEMORY, 4)
    assert second.error == "OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert second.tokens_per_second is None
    (row,) = run_jobs([dataclasses.replace(TINY, optimizer="adagrad")], in_process=True)
    assert (row.status, row.error) == ("failed", "KeyError: 'adagrad'")


def test_speed_is_relative_to_the_first_stock_arm_at_the_same_shape() -> None:
    def row(arm: str, batch_size: int, speed: float | None) -> Row:
        return Row("llama3_8b", 32, arm, 1, batch_size, 512, tokens_per_second=speed)

    ours = row("ours", 4, 150.0)
    assert ratio(ours, [row("hf:full", 2, 10.0), row("hf:full", 4, 100.0), row("hf:none", 4, 120.0), ours]) == 1.5
    assert ratio(ours, [row("hf:full", 4, None), ours]) is None


def test_engines_are_jobs() -> None:
    found = estimates.jobs(estimates._ENGINES, devices=2, layers=2)
    assert len(found) == len(estimates._ENGINES)
    strategies = {job.strategy for job in found}
    assert {"ddp", "fsdp", "fsdp2", "deepspeed_stage_2", "deepspeed_stage_3"} == strategies
    assert all(job.parsed_arm.plan == "none" and job.precision in PRECISIONS for job in found)
    assert all(Job.from_json(job.to_json()) == job for job in found)


def test_numbers_of_parameters_are_the_published_ones() -> None:
    published = {"llama3_8b": 8.03, "llama3_1b": 1.24, "qwen2_7b": 7.62, "gemma_7b": 8.54, "mistral_7b": 7.25}
    for name, billions in (published | {"phi3_mini": 3.82, "qwen3_8b": 8.19}).items():
        config = DIMS[name].config()
        with torch.device("meta"):
            model = worker.make_model(config, torch.device("meta"), torch.bfloat16)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count / 1e9 == pytest.approx(billions, abs=0.006), name
