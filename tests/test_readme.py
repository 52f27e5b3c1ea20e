"""The README's code runs as printed, and its commands exist."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

import lightning_liger
from tests.lightning_liger.tiny import VOCAB_SIZE, tiny_batch, tiny_llama

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def block_with(text: str) -> str:
    (found,) = [block for block in BLOCKS if text in block]
    return found


def test_first_example_names_a_registered_strategy() -> None:
    (name,) = re.findall(r'strategy="(\w+)"', BLOCKS[0])
    compile(BLOCKS[0], "README.md", "exec")
    assert name in StrategyRegistry


def test_mixin_example_trains(tmp_path: Path) -> None:
    source = block_with("class LM(").replace(
        "devices=1, max_steps=10", f"devices=1, max_steps=2, logger=False, default_root_dir={str(tmp_path)!r}"
    )
    scope: dict[str, Any] = {}
    exec(
        source.replace("num_hidden_layers=2", f"num_hidden_layers=1, vocab_size={VOCAB_SIZE}, num_attention_heads=4"),
        scope,
    )
    trainer, module = scope["trainer"], scope["LM"]()
    trainer.fit(module, torch.utils.data.DataLoader([tiny_batch()] * 2, batch_size=None))
    assert trainer.global_step == 2
    assert trainer.strategy.patch_report.num_replaced == 1 + 1 + 3 + 1


def test_fabric_example_takes_a_step() -> None:
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = {"L": L, "model": model, "optimizer": optimizer, "batch": tiny_batch()}
    exec(block_with("L.Fabric("), scope)
    assert torch.isfinite(scope["loss"])
    scope["optimizer"].step()


def test_patching_example_reports_and_undoes(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama()
    exec(block_with("report.undo()"), {"lightning_liger": lightning_liger, "model": model})
    assert "LlamaRMSNorm" in capsys.readouterr().out
    assert type(model.lm_head) is torch.nn.Linear


def test_kernel_example_gives_a_loss() -> None:
    scope: dict[str, Any] = {
        "hidden_size": 8,
        "hidden_states": torch.randn(5, 8),
        "norm_weight": torch.ones(8),
        "lm_head_weight": torch.randn(11, 8),
        "labels": torch.randint(0, 11, (5,)),
    }
    exec(block_with("from liger_ops import"), scope)
    assert scope["loss"].item() > 0
    assert scope["stats"].lse.shape == (5,)


def test_files_and_make_targets_that_the_readme_names_exist() -> None:
    root = Path(__file__).parents[1]
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)$", README, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile
    named = re.findall(r"(?:examples|benchmarks/results)/[\w./]+\.(?:yaml|png)", README)
    named += [f"benchmarks/results/{name}" for name in re.findall(r"`(\w+\.jsonl?)`", README)]
    assert len(named) > 5
    for path in named:
        assert (root / path).exists(), path
