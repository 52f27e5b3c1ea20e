"""The stages of a module's life that ``test_engines.py`` follows under every engine."""

from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    Batch,
    Losses,
    make_trainer,
    make_uneven_batches,
)
from tests.lightning_liger.strategies.workers.trainings import described

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
        **described(second.strategy, module.model, second.strategy.model),
        **{"losses": recorder.losses, "norms": [None], "stages": stages, "traces": traces},
        **{"num_replaced": report.num_replaced, "same_report": same_report},
    }


def move(engines: tuple[str, ...], batches: list[Batch], **options: Any) -> dict[str, Any]:
    """Fit under one engine after another."""
    module, recorder = Predicting(), Losses()
    for engine in engines:
        trainer = make_trainer(recorder, strategy=engine, **options)
        trainer.fit(module, DataLoader(batches, batch_size=None))
    found = described(trainer.strategy, module.model, trainer.strategy.model)
    return {"losses": recorder.losses, "norms": [None], **found}


def _traces(module: nn.Module) -> dict[str, Any]:
    """What set-ups might leave in a model once more each time: classes, hooks, other parameters."""
    parts = list(module.model.modules())
    hooks = [len(value) for part in parts for name, value in vars(part).items() if name.endswith("_hooks") and value]
    names = [name for name, _ in module.model.named_parameters()]
    return {"classes": [type(part).__name__ for part in parts], "hooks": sum(hooks), "parameters": names}


def results(run: dict[str, Any], engines: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What a rank saw of the module's life under each engine."""
    batches = make_uneven_batches(run["rank"], NUM_BATCHES)
    options = {"root": run["folder"], "accelerator": run["accelerator"], "devices": run["size"]}
    found = {f"life-{engine}": live(engine, batches, **options) for engine in engines}
    for moved in MOVES:
        found[f"move-{'-'.join(moved)}"] = move(moved, batches, **options)
    return found
