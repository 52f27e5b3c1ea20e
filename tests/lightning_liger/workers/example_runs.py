"""The worker that runs every yaml in ``examples/`` on several processes: the whole program, on a model and text of test
size.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import copy
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from torch import Tensor

from lightning_liger.cli import LigerCLI
from tests.lightning_liger.strategies.workers.distributed import logit_counts

EXAMPLES = Path(__file__).parents[3] / "examples"
NUM_STEPS = 2
OF_TEST_SIZE = {
    "distill.yaml": ["--model.teacher_dtype=float32"],  # random weights of the twin's would be of float64
    "lora.yaml": ["--model.lora.dropout=0"],  # the twin would draw other elements
    "next_item/next_item.yaml": ["--data.course.num_students=400"],
    "ranking/ranking.yaml": ["--data.clicks.num_rows=4000", "--data.batch_size=64"],
}
"""What tests change of an example besides its steps and folders."""

# What is given to `fit`, after the base where a yaml only chooses the strategy.
PROGRAMS = ["llama3_8b.yaml", "multi_node.yaml", "tiny.yaml"]
OF_THE_HUB = ["qlora.yaml", "quickstart.yaml"]
"""What needs a server; ``test_hub.py`` runs it."""
ON_TWO_NODES = ["multi_node.yaml"]
OTHERS = sorted(
    name
    for path in EXAMPLES.rglob("*.yaml")
    if (name := path.relative_to(EXAMPLES).as_posix()) not in PROGRAMS + OF_THE_HUB
    and "\nmodel:\n  class_path:" in path.read_text(encoding="utf-8")
)
STRATEGIES = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("strategies/*.yaml"))
OF_ONE_PROCESS = ["strategies/liger.yaml"]
OF_DEEPSPEED = [name for name in STRATEGIES if "deepspeed" in name]
_OTHERS = ON_TWO_NODES + OF_ONE_PROCESS + OF_DEEPSPEED
OF_SEVERAL_PROCESSES = [name for name in PROGRAMS + STRATEGIES if name not in _OTHERS]


def configs(example: str) -> list[str]:
    """The ``--config`` options that the comment at the top of the yaml names."""
    names = ["tiny.yaml", example] if example in STRATEGIES else [example]
    return [f"--config={EXAMPLES / name}" for name in names]


def write_text(folder: Path) -> None:
    """What :func:`run` trains on: many short documents."""
    documents = (f"line {index}: the quick brown fox jumps over {index % 7} lazy dogs" for index in range(800))
    lines = "\n".join(json.dumps({"text": document}) for document in documents)
    (folder / "text.jsonl").write_text(lines, encoding="utf-8")


def sizes(folder: Path) -> list[str]:
    """A model of test size and the text of :func:`write_text`, for the examples that train on large ones."""
    config = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
    return [
        *(f"--model.config.{name}={value}" for name, value in config.items()),
        f"--data.path={folder / 'text.jsonl'}",
        "--data.block_size=64",
        "--data.vocab_size=300",
    ]


def run(example: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Trains two steps as the example says but for the sizes, and says what was trained."""
    os.chdir(folder)  # where examples write
    sys.argv = ["lightning-liger"]
    cache = f"--data.cache_dir={folder / 'cache'}"
    cli = _fit(configs(example), [_checkpoint(folder / example)], *sizes(folder), cache, *arguments)
    trainer = cli.trainer
    return {
        "strategy": type(trainer.strategy).__name__,
        "steps": trainer.global_step,
        "losses": [trainer.callback_metrics[name].item() for name in ("train_loss_step", "val_loss")],
        "num_replaced": trainer.strategy.patch_report.num_replaced,
        "logit_counts": logit_counts(cli.model),
        "num_batches": NUM_STEPS * trainer.accumulate_grad_batches,
        "saved": (folder / example / "last.ckpt").exists(),
        "log_vocab_size": math.log(300),
    }


class LastStep(L.Callback):
    """Keeps the last step's batches, weights before it and gradients. The weights of the first one may be special:
    references and policies are equal."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.weights: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.loss = torch.tensor(torch.nan)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == NUM_STEPS - 1:
            if not self.batches:
                self.weights = {_plain(name): each.detach().clone() for name, each in module.named_parameters()}
            self.batches.append(copy.deepcopy(batch))

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
        self.gradients = {_plain(name): each.clone() for name, each in gradients.items()}

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.loss = trainer.callback_metrics.get("train_loss_step", outputs["loss"])


def _plain(name: str) -> str:
    """The name of a parameter without the wrappers of FSDP."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_forward_module.", "")


def run_alone(example: str, folder: Path, *arguments: str) -> LigerCLI:
    """Trains two steps as the example says but for where it writes; call it in the folder of the repository."""
    sys.argv = ["lightning-liger"]
    callbacks = [_checkpoint(folder / example), {"class_path": "lightning_liger.LigerMonitor"}]
    callbacks += [{"class_path": f"{LastStep.__module__}.{LastStep.__name__}"}]
    options = [f"--trainer.default_root_dir={folder}", "--trainer.check_val_every_n_epoch=1"]
    (config,) = (path.removeprefix("--config=") for path in configs(example)[:1])
    loggers = yaml.safe_load(Path(config).read_text(encoding="utf-8"))["trainer"]["logger"]
    for logger in loggers:
        logger["init_args"]["save_dir"] = str(folder / "logs")
    options.append(f"--trainer.logger={json.dumps(loggers)}")
    options += ["--trainer.devices=1", "--trainer.num_nodes=1"]
    options += OF_TEST_SIZE.get(example, []) if example in OTHERS else sizes(folder)
    return _fit(configs(example), callbacks, *options, *arguments)


def _fit(config: list[str], callbacks: list[Any], *arguments: str) -> LigerCLI:
    options = {"max_steps": NUM_STEPS, "val_check_interval": NUM_STEPS, "limit_val_batches": 1}
    options |= {"log_every_n_steps": 1, "enable_progress_bar": "false", "callbacks": json.dumps(callbacks)}
    given = [f"--trainer.{name}={value}" for name, value in options.items()]
    return LigerCLI(args=["fit", *config, *given, *arguments])


def _checkpoint(folder: Path) -> dict[str, Any]:
    options = {"dirpath": str(folder), "save_last": True, "enable_version_counter": False}
    return {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": options}


def _run_rank(device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    on_cpu = ["--trainer.accelerator=cpu"] if device == "cpu" else []
    examples = {"deepspeed": OF_DEEPSPEED, "nodes": ON_TWO_NODES}.get(folder.name, OF_SEVERAL_PROCESSES)
    node_arguments = [f"--trainer.devices={os.environ['LOCAL_WORLD_SIZE']}"] if folder.name == "nodes" else []
    results = {example: run(example, folder, *on_cpu, *node_arguments) for example in examples}
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
