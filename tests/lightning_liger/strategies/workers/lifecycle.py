"""The stages of a module's life that ``test_lifecycle.py`` follows under every engine."""

from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.lightning_liger.strategies.workers.clipping import whole_parameters
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    NUM_RANKS,
    Batch,
    Losses,
    logit_counts,
    make_trainer,
    make_uneven_batches,
)
from tests.lightning_liger.strategies.workers.engines import ENGINES

NUM_BATCHES = 3
MOVES = [("liger_ddp", "liger_fsdp"), ("liger_ddp", "liger_model_parallel")]
"""Engines under which a module is trained one after the other; the last two leave it sharded."""


class Predicting(LM):
    """The tiny model, which also predicts tokens."""

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"]).logits.argmax(-1)


def live(strategy: str, batches: list[Batch], **options: Any) -> dict[str, Any]:
    """Fit, validate, test, predict and fit again with one Trainer, then fit with a second."""
    module, recorder = Predicting(), Losses()
    loader = DataLoader(batches, batch_size=None)
    trainer = make_trainer(recorder, strategy=strategy, **options)
    trainer.fit(module, loader)
    report, traces = trainer.strategy.patch_report, [_traces(module)]
    stages = {
        "validate": trainer.validate(module, loader, verbose=False),
        "test": trainer.test(module, loader, verbose=False),
        "predict": [tokens.cpu() for tokens in trainer.predict(module, loader)],
    }
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    traces.append(_traces(module))
    same_report = trainer.strategy.patch_report is report
    second = make_trainer(recorder, strategy=strategy, **options)
    second.fit(module, loader)
    traces.append(_traces(module))
    return {
        "losses": recorder.losses,
        "stages": stages,
        "num_replaced": report.num_replaced,
        "same_report": same_report,
        "traces": traces,
        "logit_counts": logit_counts(module),
        "whole": whole_parameters(second.strategy.model),
    }


def move(engines: tuple[str, ...], batches: list[Batch], **options: Any) -> dict[str, Any]:
    """Fit under one engine after another."""
    module, recorder = Predicting(), Losses()
    for engine in engines:
        trainer = make_trainer(recorder, strategy=engine, **options)
        trainer.fit(module, DataLoader(batches, batch_size=None))
    return {
        "losses": recorder.losses,
        "logit_counts": logit_counts(module),
        "whole": whole_parameters(trainer.strategy.model),
    }


def _traces(module: nn.Module) -> dict[str, Any]:
    """What set-ups might leave in a model once more each time."""
    model = module.model
    return {
        "classes": [type(part).__name__ for part in model.modules()],
        "hooks": sum(
            len(hooks)
            for part in model.modules()
            for hooks in (
                part._forward_hooks,
                part._forward_pre_hooks,
                part._backward_hooks,
                part._backward_pre_hooks,
                part._state_dict_hooks,
                part._state_dict_pre_hooks,
                part._load_state_dict_pre_hooks,
            )
        ),
        "parameters": [name for name, _ in model.named_parameters()],
    }


def results(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a rank saw of the module's life under each engine."""
    batches = make_uneven_batches(run["rank"], NUM_BATCHES)
    options = {"root": run["folder"], "accelerator": run["accelerator"], "devices": NUM_RANKS}
    found = {f"life-{engine}": live(engine, batches, **options) for engine in ENGINES}
    for engines in MOVES:
        found[f"move-{'-'.join(engines)}"] = move(engines, batches, **options)
    return found
