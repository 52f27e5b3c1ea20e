"""The text of ``--help``: the first level, and options without the markup of docstrings."""

import re
import shutil
import textwrap

from jsonargparse import DefaultHelpFormatter
from typing_extensions import override

from lightning_liger.cli.messages import PROGRAM

SUBCOMMANDS = {
    "Train": {
        "fit": "Train a model with the settings of one or more yaml files.",
        "validate": "Evaluate a model on the validation data.",
        "test": "Evaluate a model on the test data, which fit never reads.",
        "predict": "Continue a prompt with a trained model.",
    },
    "Models": {
        "inspect": "Show what kernels replace in a model, and estimate its memory.",
        "export": "Write a checkpoint's weights to a Hugging Face folder.",
        "teacher_topk": "Write a teacher's top-k tokens to a file, for distillation.",
    },
    "Tools": {
        "doctor": "Check this machine: versions, GPUs, and each kernel.",
        "bench": "Compare speed and memory of a yaml with kernels off and on.",
        "init": "Write a commented yaml to start from, and the data it reads.",
        "schema": "Write a JSON schema, so that editors complete and check yaml.",
    },
}
"""By group, the subcommands and a sentence about each."""


def first_level() -> str:
    """The help of the command without a subcommand."""
    width = max(len(name) for group in SUBCOMMANDS.values() for name in group)
    groups = ""
    for title, group in SUBCOMMANDS.items():
        groups += "\n".join([f"{title}:", *(f"  {name:{width}}  {text}" for name, text in group.items()), "\n"])
    return f"""usage: {PROGRAM} SUBCOMMAND [options]

Train language models with fused kernels and losses that never materialize the
logits, from a yaml file.

{groups}Options of each: {PROGRAM} SUBCOMMAND --help

First steps:
  {PROGRAM} init                     # lists the recipes
  {PROGRAM} init sft                 # writes sft.yaml and its data
  {PROGRAM} fit --config sft.yaml    # trains on a GPU, or on a CPU"""


def plain(text: str) -> str:
    """A text of a docstring without markup: roles and double backticks."""
    text = re.sub(r":\w+:`~?(?:[^`]*\.)?([\w\s]+)`", lambda role: "".join(role[1].split()), text)
    return re.sub(r"``(.*?)``", r"\1", text, flags=re.DOTALL)


_HEADINGS = {
    "Runs the full": "Checkpoint to resume from",
    "Perform one evaluation": "Checkpoint to evaluate",
    "Run inference": "Checkpoint to predict with",
    "Write ": "Input and output",
}
"""How Lightning and jsonargparse name groups, the first line of a docstring, and how we do."""


class Formatter(DefaultHelpFormatter):
    """Options without the markup of docstrings, and without defaults and classes that are named elsewhere."""

    @override
    def start_section(self, heading: str | None) -> None:
        ours = (ours for text, ours in _HEADINGS.items() if (heading or "").startswith(text))
        super().start_section(next(ours, heading))

    @override
    def format_help(self) -> str:
        options = re.split(r"(?=^  -)", plain(super().format_help()), flags=re.MULTILINE)
        return "".join(map(_shortened, options))


def _shortened(option: str) -> str:
    name = option.strip().partition(" ")[0]
    # A default is in the parentheses that follow, too.
    option = re.sub(r"\s+Default:\s[^.]*\.(?=\s+\([^()]*default:\s(?!null))", "", option)
    if name not in ("--model", "--data"):
        option = re.sub(r",\s+known\s+subclasses:[^()]*\)", f"; classes: {name}.help)", option)
    indent = " " * 24
    wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns - 2, indent, indent)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    lines = re.compile(rf"(?:^{indent}\S.*\n)+", flags=re.MULTILINE)
    return lines.sub(lambda found: wrapper.fill(" ".join(found[0].split())) + "\n", option)
