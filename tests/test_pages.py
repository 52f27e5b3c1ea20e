"""The code on the pages (README.md and docs/) runs as printed and does what the page says."""

import re
import warnings
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import lightning_liger
from liger_ops import linear_cross_entropy
from lightning_liger.cli import LigerCLI
from tests.lightning_liger.tiny import TINY_CONFIG, VOCAB_SIZE, tiny_batch, tiny_llama

ROOT = Path(__file__).parents[1]
DATA = ROOT / "examples" / "data"
QUIET: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def blocks(page: str, language: str = "python") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def run(source: str, *replaced: tuple[str, str], **scope: Any) -> dict[str, Any]:
    """What the code defines; each of ``replaced`` is printed on the page."""
    for printed, value in replaced:
        assert printed in source, printed
        source = source.replace(printed, value)
    exec(source, scope)
    return scope


def readme_block(text: str) -> str:
    (found,) = [block for block in blocks("README.md") if text in block]
    return found


MIGRATION = {
    (path.stem, number): source
    for path in sorted((ROOT / "docs" / "migration").glob("*.md"))
    for number, source in enumerate(blocks(f"docs/migration/{path.name}", 'python title="after"'))
}


@pytest.mark.parametrize(("sign", "expected"), [("-", "fsdp"), ("+", "liger_fsdp")], ids=["before", "after"])
def test_code_before_and_after_names_a_registered_strategy(sign: str, expected: str) -> None:
    (diff,) = blocks("README.md", "diff")
    source = "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in (" ", sign))
    cpu = ("devices=8", 'accelerator="cpu", devices=1, logger=False')
    scope = run(source, (f'strategy="{expected}"', 'strategy="auto"'), cpu)
    assert isinstance(scope["trainer"], L.Trainer)
    assert expected in StrategyRegistry


def test_mixin_example_trains(tmp_path: Path) -> None:
    small = f"num_hidden_layers=1, vocab_size={VOCAB_SIZE}, num_attention_heads=4"
    steps = f"devices=1, max_steps=2, logger=False, default_root_dir={str(tmp_path)!r}"
    scope = run(readme_block("class LM("), ("num_hidden_layers=2", small), ("devices=1, max_steps=10", steps))
    trainer, module = scope["trainer"], scope["LM"]()
    trainer.fit(module, DataLoader([tiny_batch()] * 2, batch_size=None))  # type: ignore[arg-type]
    assert trainer.global_step == 2
    assert trainer.strategy.patch_report.num_replaced == 1 + 1 + 3 + 1
    model = module.model
    module.configure_model()
    assert module.model is model


def test_fabric_example_takes_a_step() -> None:
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = run(readme_block("L.Fabric("), L=L, model=model, optimizer=optimizer, batch=tiny_batch())
    assert scope["fabric"].strategy.patch_report.num_replaced > 0
    gradients = [parameter.grad for parameter in scope["model"].parameters() if parameter.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.any() for gradient in gradients)


def test_patching_example_reports_and_undoes(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama()
    run(readme_block("report.undo()"), lightning_liger=lightning_liger, model=model)
    printed = capsys.readouterr().out
    assert "LlamaRMSNorm" in printed
    assert "linear_cross_entropy" in printed  # options for one kernel leave the others as they are
    assert type(model.lm_head) is torch.nn.Linear


def test_yaml_example_is_a_strategy_with_these_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (settings,) = blocks("README.md", "yaml")
    path = tmp_path / "strategy.yaml"
    path.write_text(settings, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["lightning-liger"])
    arguments = [f"--config={ROOT / 'examples' / 'tiny.yaml'}", f"--config={path}"]
    cli = LigerCLI(args=[*arguments, "--trainer.accelerator=cpu", "--trainer.devices=1"], run=False)
    written = yaml.safe_load(settings)["trainer"]["strategy"]
    class_path = written["class_path"].replace("lightning_liger.", "lightning_liger:")
    assert type(cli.trainer.strategy) is resolve_name(class_path)
    assert cli.trainer.strategy.kernels == written["init_args"]["kernels"]


def test_example_on_the_page_of_the_kernels_gives_a_loss() -> None:
    inputs = {"hidden_states": torch.randn(5, 8), "norm_weight": torch.ones(8), "lm_head_weight": torch.randn(11, 8)}
    (source,) = blocks("docs/kernels.md")
    scope = run(source, hidden_size=8, labels=torch.randint(0, 11, (5,)), **inputs)
    assert scope["loss"].item() > 0
    assert scope["stats"].lse.shape == (5,)


def test_step_on_the_page_of_training_gives_the_models_loss() -> None:
    scope = run(blocks("docs/training.md")[0], L=L, LigerLMMixin=lightning_liger.LigerLMMixin)
    module = scope["OwnStep"]()
    module.model = tiny_llama()
    lightning_liger.apply_liger_kernels(module.model)
    loss = module.training_step(tiny_batch(), 0)
    torch.testing.assert_close(loss, module.model(**tiny_batch()).loss)
    loss.backward()


def test_example_on_the_page_of_losses_gives_scores_and_a_loss() -> None:
    model = tiny_llama()
    lightning_liger.apply_liger_kernels(model)
    input_ids = torch.randint(3, 60, (2, 7))
    (source,) = blocks("docs/losses.md")
    scope = run(
        source,
        model=model,
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        completion_mask=(torch.arange(7) > 2).long().expand(2, -1),
        advantages=torch.tensor([1.0, -0.5]),
    )
    log_probs = scope["scores"].log_probs
    torch.testing.assert_close(scope["loss"], -(scope["advantages"][:, None] * log_probs).sum())
    assert (log_probs != 0).sum() == 2 * 4


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_subclass_trains_with_the_mean_over_tokens_its_term_once_and_without_the_batch_that_it_skips() -> None:
    (source,) = blocks("docs/subclassing.md")
    module = run(source)["SmallEmbeddings"](config=TINY_CONFIG)
    module.configure_model()
    stock = AutoModelForCausalLM.from_config(module.config)
    stock.load_state_dict(module.model.state_dict())
    batches = [tiny_batch(2, 11, 4, seed=1), tiny_batch(1, 1, 0), tiny_batch(1, 7, 1, seed=2)]
    options = {"strategy": "liger", "devices": 1, "accumulate_grad_batches": 3, "max_steps": 1, **QUIET}
    trainer = L.Trainer(accelerator="cpu", **options)
    loaders = [DataLoader([batch], batch_size=None) for batch in batches[::2]]  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(batches, batch_size=None), loaders)  # type: ignore[arg-type]

    counts = [(batch["labels"][:, 1:] != -100).sum() for batch in batches[::2]]
    losses = [stock(**batch).loss * count for batch, count in zip(batches[::2], counts, strict=True)]
    loss = torch.stack(losses).sum() / sum(counts) + 0.01 * stock.get_input_embeddings().weight.square().mean()
    loss.backward()
    torch.optim.SGD(stock.parameters(), lr=0.1).step()
    for got, want in zip(module.model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    metrics = trainer.callback_metrics
    for index, batch in enumerate(batches[::2]):
        with torch.no_grad():
            want = stock(**batch).loss.item()
        assert metrics[f"val_loss/dataloader_idx_{index}"].item() == pytest.approx(want, rel=1e-5)
        assert metrics[f"longest/dataloader_idx_{index}"] == batch["input_ids"].shape[1]


@pytest.mark.parametrize(("page", "number"), MIGRATION, ids=lambda value: str(value))
def test_code_after_a_migration_runs(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    vocab_size = VOCAB_SIZE if page == "lightning" else 320
    tiny_llama(vocab_size=vocab_size, num_hidden_layers=1, max_position_embeddings=256).save_pretrained("model")
    AutoTokenizer.from_pretrained(DATA / "tokenizer").save_pretrained("model")
    source = MIGRATION[page, number].replace('precision="bf16-mixed"', 'precision="32-true"')
    files = {"path/to/model": "model", "pairs.jsonl": "preference.jsonl", "answers.jsonl": "completions.jsonl"}
    for printed, name in files.items():
        source = source.replace(f'"{printed}"', repr(str(tmp_path / name if name == "model" else DATA / name)))
    limits = 'accelerator="cpu", limit_train_batches=1, limit_val_batches=0, enable_model_summary=False'
    limits += "".join(f", {name}={value}" for name, value in QUIET.items())
    source = source.replace("devices=1", f"devices=1, {limits}").replace("max_steps=100", "max_steps=1")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*materializes the logits")
        scope = run(source, train_loader=DataLoader([tiny_batch()], batch_size=None))  # type: ignore[arg-type]
    if "trainer" in scope:
        assert isinstance(scope["trainer"], L.Trainer)
        assert scope["trainer"].global_step == 1
        report = scope["trainer"].strategy.patch_report
        assert any(entry.kernel == "linear_cross_entropy" for entry in report.entries)
    elif "loss" in scope:
        names = ("hidden_states", "lm_head_weight", "labels")
        assert scope["loss"] > linear_cross_entropy(*(scope[name] for name in names), softcap=30.0)  # has the z-loss
    else:
        assert (scope.get("report") or scope["model"].liger_report).num_replaced > 0


def test_migration_pages_have_code_after() -> None:
    assert {page for page, _ in MIGRATION} == {"liger_kernel", "trl", "lightning"}
