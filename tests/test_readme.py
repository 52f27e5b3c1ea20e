"""The README's code runs as printed, and its commands exist."""

import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.strategies import StrategyRegistry

import lightning_liger
from lightning_liger.cli import LigerCLI
from tests.lightning_liger.tiny import VOCAB_SIZE, tiny_batch, tiny_llama

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def block_with(text: str) -> str:
    (found,) = [block for block in BLOCKS if text in block]
    return found


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130


@pytest.mark.parametrize(("sign", "expected"), [("-", "fsdp"), ("+", "liger_fsdp")], ids=["before", "after"])
def test_code_before_and_after_names_a_registered_strategy(sign: str, expected: str) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", README, flags=re.DOTALL)
    source = "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in (" ", sign))
    (name,) = re.findall(r'strategy="(\w+)"', source)
    scope: dict[str, Any] = {}
    exec(
        source.replace("devices=8", 'accelerator="cpu", devices=1, logger=False').replace(f'"{name}"', '"auto"'), scope
    )
    assert isinstance(scope["trainer"], L.Trainer)
    assert name == expected
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
    assert scope["fabric"].strategy.patch_report.num_replaced > 0
    gradients = [parameter.grad for parameter in scope["model"].parameters()]
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)
    assert any(gradient is not None and gradient.any() for gradient in gradients)
    scope["optimizer"].step()


def test_patching_example_reports_and_undoes(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama()
    exec(block_with("report.undo()"), {"lightning_liger": lightning_liger, "model": model})
    printed = capsys.readouterr().out
    assert "LlamaRMSNorm" in printed
    assert "linear_cross_entropy" in printed  # options for one kernel leave the others as they are
    assert type(model.lm_head) is torch.nn.Linear


def test_configure_model_of_the_mixin_example_keeps_the_model() -> None:
    scope: dict[str, Any] = {}
    exec(block_with("class LM(").partition("\ntrainer = ")[0], scope)
    module = scope["LM"]()
    module.model = tiny_llama()
    model = module.model
    module.configure_model()
    assert module.model is model


def test_yaml_example_is_a_strategy_with_these_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (settings,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    path = tmp_path / "strategy.yaml"
    path.write_text(settings, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["lightning-liger"])
    arguments = [f"--config={ROOT / 'examples' / 'tiny.yaml'}", f"--config={path}"]
    cli = LigerCLI(args=[*arguments, "--trainer.accelerator=cpu", "--trainer.devices=1"], run=False)
    written = yaml.safe_load(settings)["trainer"]["strategy"]
    assert type(cli.trainer.strategy) is resolve_name(
        written["class_path"].replace("lightning_liger.", "lightning_liger:")
    )
    assert cli.trainer.strategy.kernels == written["init_args"]["kernels"]


@pytest.mark.parametrize("name", ["README.md", "docs/strategies.md", "docs/training.md"])
def test_names_that_a_page_puts_in_code_exist(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    classes = set(re.findall(r"`(?:lightning_liger\.)?((?:Fabric)?Liger\w+|AutoLiger\w+|ContextParallel)`", page))
    assert classes
    assert [each for each in classes if not hasattr(lightning_liger, each)] == []
    for strategy in re.findall(r"`\"?(liger_(?!kernel|report)[a-z_0-9]+)\"?`", page):
        assert strategy in StrategyRegistry, strategy


def test_example_on_the_page_of_the_kernels_gives_a_loss() -> None:
    scope: dict[str, Any] = {
        "hidden_size": 8,
        "hidden_states": torch.randn(5, 8),
        "norm_weight": torch.ones(8),
        "lm_head_weight": torch.randn(11, 8),
        "labels": torch.randint(0, 11, (5,)),
    }
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(source, scope)
    assert scope["loss"].item() > 0
    assert scope["stats"].lse.shape == (5,)


def test_step_on_the_page_of_training_gives_the_models_loss() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    source = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    scope: dict[str, Any] = {"L": L, "LigerLMMixin": lightning_liger.LigerLMMixin}
    exec(source, scope)
    module = scope["OwnStep"]()
    module.model = tiny_llama()
    lightning_liger.apply_liger_kernels(module.model)
    loss = module.training_step(tiny_batch(), 0)
    torch.testing.assert_close(loss, module.model(**tiny_batch()).loss)
    loss.backward()


def test_files_and_make_targets_that_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\w+)$", README, flags=re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    for target in (*targets, *re.findall(r"`make (\w+)`", README)):
        assert f"\n{target}:" in makefile
    named = re.findall(r"(?:examples|benchmarks/results|docs)/[\w./]+\.(?:yaml|png|md)", README)
    assert len(named) > 5
    for path in named:
        assert (ROOT / path).exists(), path
