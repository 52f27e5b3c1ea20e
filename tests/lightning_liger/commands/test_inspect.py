"""``lightning-liger inspect``: tables at narrow and wide screens, JSON."""

import json
from dataclasses import replace

from rich.console import Console

from lightning_liger.commands.inspect import _count, run_inspect, show
from lightning_liger.estimate import inspect_model
from lightning_liger.hardware import get_gpu
from tests.lightning_liger.estimate.test_memory import TINY, small_gpu  # noqa: F401  # a fixture


def test_tables_fit_narrow_screens(small_gpu):  # noqa: F811
    found = inspect_model("llama", config=TINY, gpu=small_gpu, num_gpus=2)
    for width in (80, 160):
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            show(found, console)
        text = capture.get()
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        for words in ("LazyLogits", "cheap dropped", "Activations", "tiny GPU", "all 6 layers stored"):
            assert words in text
        assert "2 GPUs, FSDP" in text
        assert "lightning-liger, plan of memory_budget=auto" in text
    gpu = found.as_dict()["gpu"]
    assert set(gpu) == {"name", "memory_bytes", "limit_bytes", "fits"}
    assert set(gpu["fits"][0]) == {"implementation", "activations", "longest_seq_len", "largest_batch_size"}


def test_a_budget_that_no_plan_keeps_is_said(small_gpu, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setenv("COLUMNS", "40")  # on which digits would be lost
    run_inspect("llama", config=TINY, gpu=small_gpu, memory_budget=0.02)
    text = " ".join(capsys.readouterr().out.split())
    assert "The plan of memory_budget=0.02, 0.0 GiB:" in text
    assert "It exceeds the budget: no plan has a lower peak." in text


def test_unknown_activations_are_shown(monkeypatch):
    def fails(*args):
        raise NotImplementedError("no [such] kernel\nmore")

    monkeypatch.setattr("lightning_liger.estimate.memory.run_step", fails)
    console = Console(width=160, color_system=None)
    found = inspect_model("llama", config=TINY)
    with console.capture() as capture:
        show(replace(found, model="runs/[bold]"), console)
    assert (found.rows, found.unknown) == ([], "NotImplementedError: no [such] kernel")
    assert found.state_bytes["weights"] > 0
    assert all(text in capture.get() for text in ("runs/[bold] (", "unknown", "no [such] kernel"))


def test_json(capsys):
    assert run_inspect("llama", config=TINY, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        *("model", "model_type", "num_parameters", "num_trained", "settings", "kernels", "state_bytes", "memory"),
        *("gpu", "unknown", "notes", "num_active", "flops_per_token", "float8_flops_per_token", "step_seconds"),
    }
    row = found["memory"][0]
    assert set(row) == {"implementation", "activations", "bytes", "largest_logits_bytes", "plan", "fits"}
    assert row["bytes"]["total"] == sum(size for name, size in row["bytes"].items() if name != "total")
    assert found["gpu"] is None
    assert found["num_active"] == found["num_parameters"]


def test_active_parameters_and_flops_of_a_mixture():
    config = {**TINY, "num_local_experts": 4, "num_experts_per_tok": 1}
    found, more = (inspect_model("mixtral", config={**config, "num_local_experts": n}, seq_len=16) for n in (4, 8))
    router = TINY["num_hidden_layers"] * TINY["hidden_size"] * 4
    assert more.num_active - found.num_active == router
    assert more.flops_per_token - found.flops_per_token == 6 * router
    assert more.num_parameters > found.num_parameters + router
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        show(found, console)
    assert f"{_count(found.num_active)} active" in capture.get()
    assert f"A token takes {found.flops_per_token / 1e9:.4g} GFLOP" in capture.get()


def test_time_of_a_step_in_float8_next_to_that_without():
    found = inspect_model("llama", config=TINY)
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        show(found, console)
        flops = found.flops_per_token / 1e9
        found = replace(found, gpu=get_gpu("h200-141gb"), flops_per_token=48e9, float8_flops_per_token=42e9)
        show(found, console)
        show(replace(found, settings=replace(found.settings, fp8=True)), console)
    lines = [line for line in capture.get().splitlines() if "GFLOP" in line or "By its FLOPs" in line]
    slow, fast = found.step_seconds(False), found.step_seconds(True)
    assert slow > 1.4 * fast
    own = "GFLOP in forward and backward, of the model's own"
    step = "By its FLOPs, a step without recomputation takes about"
    assert lines == [
        f"A token takes {flops:.4g} {own}.",
        f"A token takes 48 {own}, 42 of them in float8.",
        f"{step} {slow:.3g} s, {slow:.3g} s without float8.",
        f"A token takes 48 {own}, 42 of them in float8.",
        f"{step} {fast:.3g} s, {slow:.3g} s without float8.",
    ]
