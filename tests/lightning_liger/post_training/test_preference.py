"""Modules of preference losses train as loops over single sequences of the stock model do."""

import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_liger import (
    CPOOptions,
    DPOOptions,
    KTOOptions,
    LigerCPO,
    LigerDPO,
    LigerKTO,
    LigerModelParallelStrategy,
    LigerORPO,
    LigerPreferenceMixin,
    LigerTPO,
    ORPOOptions,
    TPOOptions,
)
from lightning_liger.losses.dpo import PairLogProbs
from lightning_liger.losses.kto import kto_loss
from lightning_liger.post_training import preference
from tests.lightning_liger.post_training.preference_data import (
    Sequences,
    other_llama,
    packed,
    padded,
    sequences,
    sums,
    token_log_probs,
)
from tests.lightning_liger.post_training.training import Recorded, assert_same_parameters, fit, loader, metrics_of
from tests.lightning_liger.tiny import TINY_CONFIG, VOCAB_SIZE, quiet_trainer, tiny_llama

BETA = 0.3


class Module(LigerPreferenceMixin, Recorded):
    def __init__(self, loss: Any, with_reference: bool = True, **attributes: Any) -> None:
        super().__init__(preference_loss=loss, **attributes)
        self.model: nn.Module = tiny_llama()
        if with_reference and self.needs_reference:
            self.ref_model = other_llama()


def pairs_of(number: int, seed: int, parts: int = 2) -> list[Sequences]:
    """Of each example its sequences: chosen, rejected, and the reference of triples."""
    items = sequences(number * parts, seed)
    return [items[parts * index : parts * (index + 1)] for index in range(number)]


def collated(examples: list[Sequences], pack: bool = False) -> dict[str, Tensor]:
    items = [example[part] for part in range(len(examples[0])) for example in examples]
    return packed(items, padding=3) if pack else padded(items)


def by_hand(model: nn.Module, examples: list[Sequences], options: Any) -> Tensor:
    """The loss of scores of single sequences, with LD-DPO's and WPO's weights; its formula is tested elsewhere."""
    reference, rows, num_labels, alpha = other_llama(), [], 0, getattr(options, "ld_alpha", None)
    for chosen, rejected, *gold in examples:
        numbers = [len(ids) - prompt for ids, prompt in (chosen, rejected)]
        shared, weight, weighted = min(numbers), torch.ones(()), []
        for scorer, each in itertools.product((model, reference), (chosen, rejected)):
            scores, (ids, prompt) = token_log_probs(scorer, each), each
            weighted.append(scores[:shared].sum() + (1.0 if alpha is None else alpha) * scores[shared:].sum())
            if scorer is model:
                probs = model(input_ids=ids[None]).logits[0, prompt - 1 : -1].detach().softmax(-1)
                weight = weight * (scores.detach() - probs.square().sum(-1).log()).mean().exp()
        scored = gold[0] if gold else (chosen[0], 1) if isinstance(options, ORPOOptions) else chosen
        labels = token_log_probs(model, scored)
        num_labels += len(labels)
        columns = *weighted[:2], *map(torch.tensor, numbers), *weighted[2:], weight, -labels.sum(), labels.sum()
        rows.append(torch.stack(columns))
    losses = options.losses(PairLogProbs(*torch.stack(rows, 1)))
    return losses.losses.mean() + (0.0 if losses.nll is None else losses.nll.sum() / num_labels)


LOSSES: dict[str, Any] = {
    "dpo_and_sft": DPOOptions(("sigmoid", "sft"), loss_weights=(1.0, 0.5), beta=BETA),
    "ld_dpo": DPOOptions(beta=BETA, ld_alpha=0.4),
    "wpo_ipo": DPOOptions("ipo", beta=BETA, use_weighting=True),
    "simpo_and_nll": CPOOptions("simpo", beta=BETA),
    "orpo": ORPOOptions(beta=BETA),
    "tpo": TPOOptions(beta=BETA),
}


def trained(loss: Callable[[nn.Module], Tensor]) -> tuple[nn.Module, float]:
    """The tiny model after a step, and the value of the loss before it."""
    model = tiny_llama()
    value = loss(model)
    value.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model, value.item()


def assert_trained_as(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> float:
    model, value = trained(loss)
    assert_same_parameters(module, model, rtol=2e-5)
    return value


@pytest.mark.parametrize("name", LOSSES)
def test_steps_are_those_of_single_sequences_however_they_are_split_and_packed(name: str) -> None:
    options = LOSSES[name]
    examples = pairs_of(5, seed=3, parts=options.num_sequences)
    model, value = trained(lambda model: by_hand(model, examples, options))
    splits = {1: [5], 2: [2, 3], 3: [1, 3, 1]}
    for number, sizes in splits.items():
        starts = [sum(sizes[:index]) for index in range(number)]
        pack = number == 3
        batches = [collated(examples[i : i + n], pack) for i, n in zip(starts, sizes, strict=True)]
        module = Module(options)
        trainer = fit(module, batches, accumulate_grad_batches=number, strategy="liger" if number > 1 else "auto")
        assert_same_parameters(module.model, model, rtol=2e-5)
        assert module.steps[-1]["train_loss_step"] == pytest.approx(value, rel=1e-5)
        assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(value, rel=1e-5)


def test_kto_weights_classes_and_subtracts_the_divergence_of_mismatched_pairs() -> None:
    items, labels = sequences(4, seed=1), torch.tensor([True, False, False, True])
    mismatched = [
        (torch.cat((ids[:prompt], other[start:])), prompt)
        for (ids, prompt), (other, start) in zip(items, [items[-1], *items[:-1]], strict=True)
    ]
    batch = padded(items) | padded(mismatched, prefix="KL_") | {"label": labels}
    options = KTOOptions(beta=BETA, desirable_weight=1.5, undesirable_weight=0.5)
    module = Module(options)
    logged = metrics_of(fit(module, [batch]))
    kl = (sums(tiny_llama(), mismatched) - sums(other_llama(), mismatched)).mean().detach().clamp(min=0)
    reference = sums(other_llama(), items)
    value = assert_trained_as(
        module.model,
        lambda model: kto_loss(sums(model, items), reference, labels, options, baseline=kl)[0].mean(),
    )
    ratios = (sums(tiny_llama(), items) - reference).detach()
    chosen, rejected = BETA * ratios[labels].mean(), BETA * ratios[~labels].mean()
    names = ("loss", "rewards/chosen", "rewards/margins", "kl")
    expected = list(map(float, (value, chosen, chosen - rejected, kl)))
    assert [logged[f"train_{name}"] for name in names] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_labeled_losses_without_mismatched_pairs() -> None:
    items, labels = sequences(3, seed=2), torch.ones(3, dtype=torch.bool)
    for loss_type in ("apo_zero_unpaired", "bco"):
        module = Module(KTOOptions(loss_type, beta=BETA))
        logged = metrics_of(fit(module, [padded(items) | {"label": labels}]))
        ratios = BETA * (sums(tiny_llama(), items) - sums(other_llama(), items)).detach()
        want = 1 - torch.sigmoid(ratios) if loss_type != "bco" else -F.logsigmoid(ratios - ratios.mean())
        assert logged["train_loss"] == pytest.approx(float(want.mean()), rel=1e-4)
        assert logged["train_rewards/rejected"] != logged["train_rewards/rejected"]  # NaN, of no completion
        assert logged["train_rewards/margins"] != logged["train_rewards/margins"]
        assert module._reward_sums[1].tolist() == ([3.0, 0.0] if loss_type == "bco" else [0.0, 0.0])


def test_metrics_of_pairs_are_those_of_completion_tokens() -> None:
    """The mean logits of liger-kernel, and of TRL's CPO, are over prompts and padding too."""
    examples, model = pairs_of(3, seed=5), tiny_llama()
    entropies, expected = [], {}
    for part, name in enumerate(("chosen", "rejected")):
        items = [example[part] for example in examples]
        found = torch.cat([model(input_ids=ids[None]).logits[0, start - 1 : -1].detach() for ids, start in items])
        expected[f"logits/{name}"] = found.mean()
        expected[f"logps/{name}"] = sums(model, items).mean()
        entropies.append(torch.distributions.Categorical(logits=found).entropy())
        if name == "chosen":
            targets = torch.cat([ids[start:] for ids, start in items])
            expected["mean_token_accuracy"] = (found.argmax(-1) == targets).float().mean()
    expected["entropy"] = torch.cat(entropies).mean()
    expected["num_tokens"] = sum(len(ids) for example in examples for ids, _ in example)
    trainer = quiet_trainer()
    trainer.validate(Module(DPOOptions()), loader([collated(examples[:1]), collated(examples[1:])]), verbose=False)
    for name, value in expected.items():
        assert metrics_of(trainer)[f"val_{name}"] == pytest.approx(float(value), rel=1e-4), name


def test_logits_are_never_materialized_and_the_policy_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module(DPOOptions())
    calls: list[str] = []
    for name, model in (("policy", module.model), ("reference", module.ref_model)):
        model.register_forward_hook(lambda *_, name=name: calls.append(f"{name} {torch.is_grad_enabled()}"))
    monkeypatch.setattr("lightning_liger.lazy.logits.materialize", lambda *_: pytest.fail("logits were materialized"))
    fit(module, [collated(pairs_of(2, 0))])
    assert calls == ["reference False", "policy True"]


def test_reference_is_frozen_not_saved_and_made_again(tmp_path: Path) -> None:
    data = [collated(pairs_of(2, seed)) for seed in range(2)]
    module = Module(DPOOptions(beta=BETA))
    module.model.train()
    trainer = fit(module, data)
    for got, want in zip(module.ref_model.parameters(), other_llama().parameters(), strict=True):
        assert torch.equal(got, want)
        assert got.grad is None
        assert not got.requires_grad
    assert not module.ref_model.training
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert {key.split(".")[0] for key in state} == {"model"}
    resumed = Module(DPOOptions(beta=BETA))
    fit(resumed, data, ckpt_path=path, max_epochs=2)
    whole = Module(DPOOptions(beta=BETA))
    fit(whole, data, max_epochs=2)
    assert_same_parameters(resumed.model, whole.model)


def test_stored_columns_replace_the_reference() -> None:
    options = LOSSES["dpo_and_sft"]
    examples = pairs_of(3, seed=4)
    reference = other_llama()
    columns = {
        f"ref_{name}_logps": sums(reference, [example[part] for example in examples])
        for part, name in enumerate(("chosen", "rejected"))
    }
    for kind in ("auto", "columns"):
        module = Module(options, with_reference=False, reference=kind)
        fit(module, [collated(examples) | columns])
        assert_trained_as(module.model, lambda model: by_hand(model, examples, options))
    for value in (float("nan"), -float("inf")):
        wrong = columns | {"ref_rejected_logps": torch.tensor([0.0, value, 0.0])}
        with pytest.raises(ValueError, match=rf"'ref_rejected_logps'\] must be finite .*, got \[{value}\]"):
            fit(Module(options), [collated(examples) | wrong])


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", ["auto", "liger", "liger_ddp", "liger_fsdp", "liger_model_parallel"])
def test_stored_columns_are_not_rounded(strategy: str, precision: Any) -> None:
    """Lightning's bf16-true casts whole batches, FSDP those of mixed precision: -171.4 would be -171.0."""
    stored = {"ref_chosen_logps": torch.tensor([-171.37]), "ref_rejected_logps": torch.tensor([-169.81])}
    seen: list[Any] = []

    class Watched(Module):
        def step_loss(self, stage: str, batch: Any) -> Any:
            seen.append({key: batch[key] for key in stored})
            return super().step_loss(stage, batch)

    module, trainer = Watched(DPOOptions()), quiet_trainer(strategy=strategy, precision=precision, max_steps=1)
    data = loader([collated(pairs_of(1, seed=3)) | stored])
    if (strategy, precision) == ("auto", "bf16-true"):
        with pytest.raises(TypeError, match=r"ref_chosen_logps.*float32.*bfloat16"):
            trainer.fit(module, data)
    else:
        trainer.fit(module, data)
        assert all(torch.equal(seen[0][key], value) for key, value in stored.items())


def test_adapters_off_are_the_reference() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], lora_dropout=0.5, init_lora_weights=False)
    examples = pairs_of(2, seed=6)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(tiny_llama(), config)
    module = Module(DPOOptions(beta=BETA), with_reference=False)
    module.model = adapted
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    twin = peft.get_peft_model(tiny_llama(), config)
    twin.load_state_dict(adapted.state_dict())
    twin.eval()  # without dropout
    margins = [sums(twin, items) - sums(tiny_llama(), items).detach() for items in zip(*examples, strict=True)]
    (-F.logsigmoid(BETA * (margins[0] - margins[1])).mean()).backward()
    torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1).step()
    modes: list[tuple[bool, bool]] = []
    adapted.register_forward_hook(lambda model, *_: modes.append((model.training, torch.is_grad_enabled())))
    fit(module, [collated(examples)])
    assert modes == [(False, False), (True, True)]
    assert_same_parameters(adapted, twin, rtol=2e-5)
    assert [name for name, parameter in adapted.named_parameters() if parameter.requires_grad] == trained


def test_reference_is_computed_once_and_kept_for_the_same_weights(tmp_path: Path) -> None:
    options = LOSSES["dpo_and_sft"]
    examples = pairs_of(5, seed=3)
    data = [collated(examples[:2]), collated(examples[2:])]
    calls: list[bool] = []

    def run(data: Any, folder: Path | None = tmp_path, **attributes: Any) -> Module:
        module = Module(
            options, precompute_ref_log_probs=True, ref_log_probs_folder=folder and str(folder), **attributes
        )
        calls.clear()
        if module.ref_model is not None:
            module.ref_model.register_forward_hook(lambda *_: calls.append(True))
        fit(module, data, [collated(examples[1:4])], accumulate_grad_batches=2)
        return module

    module = run(data)
    assert len(calls) == 2  # the validation data have the same sequences
    assert_trained_as(module.model, lambda model: by_hand(model, examples, options))
    assert len(list(tmp_path.iterdir())) == 1
    module = run([packed([e[part] for part in range(2) for e in examples])])  # in another form, with padding elsewhere
    assert calls == []
    more = [*data, collated(pairs_of(1, seed=9))]
    run(more)
    assert len(calls) == 1  # what is new
    module = run(data, folder=None)
    assert len(calls) == 2
    without = Module(options, with_reference=False, precompute_ref_log_probs=True)
    # The policy as it was is the reference.
    fit(without, data, accumulate_grad_batches=2).save_checkpoint(tmp_path / "last.ckpt")
    resumed = Module(options, with_reference=False, precompute_ref_log_probs=True)
    with pytest.raises(ValueError, match=r"must be those of the run that is resumed.* the checkpoint lacks"):
        fit(resumed, more, max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    fit(resumed, data, max_epochs=1, ckpt_path=tmp_path / "last.ckpt")

    def against_itself(model: nn.Module) -> Tensor:
        chosen, rejected = ([example[part] for example in examples] for part in range(2))
        d = sums(model, chosen) - sums(model, rejected)
        nll = -torch.cat([token_log_probs(model, each) for each in chosen]).mean()
        return -F.logsigmoid(BETA * (d - d.detach())).mean() + 0.5 * nll

    assert_trained_as(without.model, against_itself)


def test_stored_reference_is_found_without_hooks_and_those_it_needs_are_named() -> None:
    data = [collated(pairs_of(2, seed=3))]

    class OwnTransfer(Module):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return dict(batch)

    modules = [cls(DPOOptions(), with_reference=False, precompute_ref_log_probs=True) for cls in (Module, OwnTransfer)]
    for module in modules:
        fit(module, data, max_epochs=2)
    for got, want in zip(modules[1].parameters(), modules[0].parameters(), strict=True):
        assert torch.equal(got, want)
    for name in ("on_fit_start", "on_save_checkpoint", "on_load_checkpoint"):
        overriding = type("Overriding", (Module,), {name: lambda self, *args: None})
        with pytest.raises(RuntimeError, match=rf"Overriding.{name} must call super\(\).{name}"):
            fit(overriding(DPOOptions(), with_reference=False, precompute_ref_log_probs=True), data)


def test_data_that_changes_after_the_reference_was_computed_is_an_error() -> None:
    class Changing(list):  # type: ignore[type-arg]
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.reads += 1
            return collated(pairs_of(2, seed=self.reads))

    module = Module(DPOOptions(), precompute_ref_log_probs=True)
    before = [parameter.clone() for parameter in module.model.parameters()]
    with pytest.raises(KeyError, match=r"4 of its 4 are new .* the data changed"):
        fit(module, Changing([0]))
    assert all(torch.equal(*both) for both in zip(before, module.model.parameters(), strict=True))


def test_all_masked_batch_gives_zero_gradients() -> None:
    batch = collated(pairs_of(2, seed=0))
    batch["completion_mask"].zero_()
    batch["attention_mask"][:, 1:] = 0
    for options in (DPOOptions(("sigmoid", "sft")), CPOOptions("simpo"), ORPOOptions(), DPOOptions("ipo")):
        module = Module(options)
        assert torch.isfinite(fit(module, [batch]).callback_metrics["train_loss"])
        for got, want in zip(module.model.parameters(), tiny_llama().parameters(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("engine", ["one_device", "fsdp2"])
def test_reference_follows_the_policy_also_after_resuming(tmp_path: Path, engine: str) -> None:
    def make() -> Any:
        return "liger" if engine == "one_device" else LigerModelParallelStrategy(save_distributed_checkpoint=False)

    def train(steps: int, checkpoint: Path | None = None) -> dict[str, Tensor]:
        arguments: dict[str, Any] = {"sync_ref_model": True, "ref_model_mixup_alpha": 0.25, "ref_model_sync_steps": 2}
        module = LigerDPO(pretrained=str(tmp_path / "model"), learning_rate=1e-2, num_training_steps=6, **arguments)
        data = [collated(pairs_of(2, seed=seed)) for seed in range(6)]
        options: dict[str, Any] = {"max_steps": steps, "strategy": make(), "callbacks": [Keep()]}
        fit(module, data, ckpt_path=checkpoint, **options)
        state: dict[str, Tensor] = torch.load(tmp_path / f"{steps}.ckpt", weights_only=True)["state_dict"]
        return state

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            head: Any = pl_module.model.lm_head.weight.detach()  # type: ignore[union-attr]
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")
            heads.append((head.full_tensor() if isinstance(head, DTensor) else head).clone())

    tiny_llama().save_pretrained(tmp_path / "model")
    heads: list[Tensor] = []
    straight = train(5)
    expected = tiny_llama().lm_head.weight.detach()
    for policy in (heads[1], heads[3]):
        expected = 0.75 * expected + 0.25 * policy
    torch.testing.assert_close(straight["ref_model.lm_head.weight"], expected)
    torch.testing.assert_close(train(5, tmp_path / "3.ckpt"), straight)


def test_reference_that_cannot_follow_the_policy_is_refused(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="sync_ref_model must be False with precompute_ref_log_probs=True"):
        LigerDPO(config=TINY_CONFIG, sync_ref_model=True, precompute_ref_log_probs=True)
    refused = ({"config": TINY_CONFIG, "reference": "columns"}, "liger"), ({"pretrained": str(tmp_path)}, "liger_fsdp")
    for arguments, strategy in refused:
        with pytest.raises(ValueError, match=r"sync_ref_model must be False (without a ref_model|under Liger|for a)"):
            fit(LigerDPO(sync_ref_model=True, **arguments), [collated(pairs_of(2, seed=0))], strategy=strategy)


def test_finished_modules_train_from_plain_arguments(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder, path, data = tmp_path / "model", tmp_path / "last.ckpt", [collated(pairs_of(2, seed=0))]
    tiny_llama().save_pretrained(folder)
    for arguments in (
        {"config": TINY_CONFIG},
        {"pretrained": folder, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.1]},
        {"pretrained": str(folder), "lora": {"r": 2, "target_modules": ["q_proj"]}},
        {"config": TINY_CONFIG, "precompute_ref_log_probs": True},
    ):
        module = LigerDPO(**arguments, learning_rate=1e-2)
        trainer = fit(module, data, data, strategy="auto")
        assert module.hparams["loss_type"] == arguments.get("loss_type", "sigmoid")
        assert (module.ref_model is None) == ("lora" in arguments or "precompute_ref_log_probs" in arguments)
        assert abs(float(trainer.callback_metrics["train_rewards/margins"])) < 1e-5  # it starts as its reference
        assert float(trainer.callback_metrics["val_rewards/margins"]) != 0
        trainer.save_checkpoint(path)
        state = torch.load(path, weights_only=True)
        json.dumps(dict(state["hyper_parameters"]))
        assert not any("ref_model" in key for key in state["state_dict"])
        assert LigerDPO.load_from_checkpoint(path).hparams == module.hparams
    others = (LigerCPO, {}), (LigerORPO, {}), (LigerTPO, {"tpo_alpha": 0.0}), (LigerKTO, {"loss_type": "bco"})
    for make, options in others:
        module = make(config=TINY_CONFIG, **options)
        fit(module, [data[0] | {"label": torch.arange(4) % 2 == 0}]).save_checkpoint(path)
        assert make.load_from_checkpoint(path).preference_loss == module.preference_loss


class Pairs(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader([collated(pairs_of(2, seed=1))] * 2)

    val_dataloader = train_dataloader


def tiny_dpo(**arguments: Any) -> LigerDPO:
    return LigerDPO(config=TINY_CONFIG, min_lr_ratio=1.0, **arguments)


def messages(run: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return " ".join(str(each.message) for each in caught)


def test_warnings_are_of_other_random_references_only(tmp_path: Path) -> None:
    """Neither of a reference in evaluation mode, nor of a hook that Lightning takes for a mistake."""
    module, trainer = tiny_dpo(), quiet_trainer(max_epochs=1)
    torch.manual_seed(0)
    text = messages(lambda: trainer.fit(module, datamodule=Pairs()))
    assert "eval mode" not in text
    assert "on_before_batch_transfer" not in text
    assert not any(part.training for part in module.ref_model.modules())
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    for seed in (0, 1):
        torch.manual_seed(seed)
        options: dict[str, Any] = {"datamodule": Pairs(), "ckpt_path": path, "verbose": False, "weights_only": False}
        text = messages(lambda options=options: quiet_trainer().validate(tiny_dpo(), **options))
        assert ("other random weights" in text) == (seed == 1)


def test_validation_before_the_reference_was_computed_says_so() -> None:
    with pytest.raises(ValueError, match="has no reference for this batch: precompute_ref_log_probs=True computes"):
        quiet_trainer().validate(tiny_dpo(precompute_ref_log_probs=True), datamodule=Pairs(), verbose=False)


@pytest.mark.parametrize(
    ("loss", "pack", "is_apart"),
    [
        (DPOOptions(beta=BETA), True, True),
        (DPOOptions(beta=BETA, loss_type="ipo", use_weighting=True), False, True),
        (DPOOptions(beta=BETA, loss_type="aot"), False, False),
        (ORPOOptions(), True, False),
    ],
    ids=str,
)
def test_losses_of_single_pairs_are_taken_pair_by_pair(
    loss: Any, pack: bool, is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the gradient of a trained head is needed, and all logits of a pair are in memory at once."""
    batches, results = [collated(pairs_of(3, seed), pack) for seed in range(2)], []
    calls: list[Any] = []
    original = preference.unit_loss
    monkeypatch.setattr(preference, "unit_loss", lambda *a, **k: calls.append(a) or original(*a, **k))  # type: ignore[func-returns-value]
    num_tokens = batches[0]["input_ids"].numel() if pack else 2 * batches[0]["input_ids"].shape[1]
    for max_tokens in (num_tokens - 1, num_tokens):
        monkeypatch.setattr(preference, "MAX_UNIT_BYTES", max_tokens * VOCAB_SIZE * 4)
        module = Module(loss)
        fit(module, batches[:1])
        results.append((module.steps, list(module.model.parameters())))
        assert len(calls) == (is_apart and max_tokens == num_tokens)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=5e-6)
    calls.clear()
    module = Module(loss)
    module.model.lm_head.requires_grad_(False)
    fit(module, batches)
    quiet_trainer(strategy="liger").validate(Module(loss), loader(batches), verbose=False)
    fit(Module(loss), batches, strategy="auto")
    assert not calls
