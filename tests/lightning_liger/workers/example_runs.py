"""The worker that runs every yaml in ``examples/`` on several processes: the whole program, on a model and text of test
size.

``python -m`` this module with ``cpu OUT`` is one rank of ``launch(..., worker=...)``.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_liger.cli import LigerCLI
from tests.lightning_liger.strategies.workers.distributed import logit_counts

EXAMPLES = Path(__file__).parents[3] / "examples"
NUM_STEPS = 2

# What is given to `fit`, after the base where a yaml only chooses the strategy.
PROGRAMS = ["llama3_8b.yaml", "multi_node.yaml", "tiny.yaml"]
ON_TWO_NODES = ["multi_node.yaml"]
POST_TRAINING = sorted(path.name for path in EXAMPLES.glob("*.yaml") if path.name not in PROGRAMS)
STRATEGIES = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("strategies/*.yaml"))
OF_ONE_PROCESS = ["strategies/liger.yaml"]
OF_DEEPSPEED = [name for name in STRATEGIES if "deepspeed" in name]
_OTHERS = ON_TWO_NODES + OF_ONE_PROCESS + OF_DEEPSPEED
OF_SEVERAL_PROCESSES = [name for name in PROGRAMS + STRATEGIES if name not in _OTHERS]


def configs(example: str) -> list[str]:
    """The ``--config`` options that the comment at the top of the yaml names."""
    names = [example] if example in PROGRAMS else ["tiny.yaml", example]
    return [f"--config={EXAMPLES / name}" for name in names]


def write_text(folder: Path) -> None:
    """What :func:`run` trains on: many short documents."""
    documents = (f"line {index}: the quick brown fox jumps over {index % 7} lazy dogs" for index in range(800))
    lines = "\n".join(json.dumps({"text": document}) for document in documents)
    (folder / "text.jsonl").write_text(lines, encoding="utf-8")


def run(example: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Trains two steps as the example says but for the sizes, and says what was trained."""
    os.chdir(folder)  # where examples write
    sys.argv = ["lightning-liger"]
    config = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
    cli = LigerCLI(
        args=[
            "fit",
            *configs(example),
            *(f"--model.config.{name}={value}" for name, value in config.items()),
            f"--trainer.max_steps={NUM_STEPS}",
            "--trainer.limit_val_batches=1",
            f"--trainer.val_check_interval={NUM_STEPS}",
            "--trainer.log_every_n_steps=1",
            "--trainer.enable_progress_bar=false",
            f"--trainer.callbacks={json.dumps([_checkpoint(folder / example)])}",
            f"--data.path={folder / 'text.jsonl'}",
            "--data.block_size=64",
            f"--data.cache_dir={folder / 'cache'}",
            "--data.vocab_size=300",
            *arguments,
        ]
    )
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


def run_post_training(example: str, folder: Path, *arguments: str) -> LigerCLI:
    """Trains two steps as the example says but for where it writes; call it in the folder of the repository."""
    sys.argv = ["lightning-liger"]
    callbacks = [_checkpoint(folder / example), {"class_path": "lightning_liger.LigerMonitor"}]
    return LigerCLI(
        args=[
            "fit",
            f"--config=examples/{example}",
            f"--trainer.default_root_dir={folder}",
            f"--trainer.max_steps={NUM_STEPS}",
            f"--trainer.val_check_interval={NUM_STEPS}",
            "--trainer.check_val_every_n_epoch=1",
            "--trainer.limit_val_batches=1",
            f"--trainer.callbacks={json.dumps(callbacks)}",
            "--trainer.enable_progress_bar=false",
            "--trainer.devices=1",
            *arguments,
        ]
    )


def _checkpoint(folder: Path) -> dict[str, Any]:
    options = {"dirpath": str(folder), "save_last": True, "enable_version_counter": False}
    return {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": options}


def _run_rank(device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    on_cpu = ["--trainer.accelerator=cpu"] if device == "cpu" else []
    examples = {"deepspeed": OF_DEEPSPEED, "nodes": ON_TWO_NODES}.get(folder.name, OF_SEVERAL_PROCESSES)
    of_node = [f"--trainer.devices={os.environ['LOCAL_WORLD_SIZE']}"] if folder.name == "nodes" else []
    results = {example: run(example, folder, *on_cpu, *of_node) for example in examples}
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
