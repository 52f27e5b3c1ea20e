"""``lightning-liger inspect``: tables at narrow and wide screens, JSON."""

import json

import pytest
from rich.console import Console

from lightning_liger.commands.inspect import run_inspect, show
from lightning_liger.estimate import inspect_model
from tests.lightning_liger.estimate.test_memory import TINY


def test_tables_fit_narrow_screens() -> None:
    found = inspect_model("llama", config=TINY, gpu="h100-80gb", num_gpus=2)
    for width in (80, 160):
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            show(found, console)
        text = capture.get()
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        for words in ("LazyLogits", "cheap dropped", "Activations", "NVIDIA H100 80GB (SXM)", "all 6 layers stored"):
            assert words in text
        assert "2 GPUs, FSDP" in text


def test_unknown_activations_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise NotImplementedError("no [such] kernel")

    monkeypatch.setattr("lightning_liger.estimate.memory.run_step", fails)
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        show(inspect_model("llama", config=TINY), console)
    assert "unknown" in capture.get() and "no [such] kernel" in capture.get()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspect("llama", config=TINY, gpu="h100-80gb", json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        *("model", "model_type", "num_parameters", "num_trained", "settings", "kernels", "state_bytes", "memory"),
        *("gpu", "unknown", "notes"),
    }
    row = found["memory"][0]
    assert set(row) == {"implementation", "activations", "bytes", "largest_logits_bytes", "plan", "fits"}
    assert row["bytes"]["total"] == sum(size for name, size in row["bytes"].items() if name != "total")
    assert set(found["gpu"]) == {"name", "memory_bytes", "limit_bytes", "fits"}
