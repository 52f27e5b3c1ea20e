"""The text of ``--help``: the first level, and options without the markup of docstrings."""

import re
from argparse import Action

from jsonargparse import DefaultHelpFormatter
from typing_extensions import override

from lightning_liger.cli.messages import PROGRAM

SUBCOMMANDS = {
    "Train": {
        "fit": "Train a model with the settings of one or more yaml files.",
        "validate": "Measure a model on the validation data.",
        "test": "Measure a model on the test data, which fit never reads.",
        "predict": "Continue a prompt with a trained model.",
    },
    "Models": {
        "inspect": "Show what kernels replace in a model, and estimate its memory.",
        "export": "Write a checkpoint's weights to a Hugging Face folder.",
        "teacher_topk": "Write a teacher's likeliest tokens to a file, to distil from.",
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
    groups = [
        "\n".join([f"{title}:", *(f"  {name:{width}}  {text}" for name, text in group.items())])
        for title, group in SUBCOMMANDS.items()
    ]
    return "\n\n".join(
        [
            f"usage: {PROGRAM} SUBCOMMAND [options]",
            "Train language models with fused kernels and losses that never materialize the\n"
            "logits, from a yaml file.",
            *groups,
            f"Options of each: {PROGRAM} SUBCOMMAND --help",
            f"First steps:\n  {PROGRAM} init                     # lists the stories\n"
            f"  {PROGRAM} init sft                 # writes sft.yaml and its data\n"
            f"  {PROGRAM} fit --config sft.yaml    # trains on a GPU, or on a CPU",
        ]
    )


def plain(text: str) -> str:
    """A text of a docstring without markup: roles and double backticks."""
    text = re.sub(r":\w+:`~?(?:[^`]*\.)?(\w+)`", r"\1", text)
    return re.sub(r"``(.*?)``", r"\1", text)


_HEADINGS = {
    "Runs the full": "Checkpoint to resume from",
    "Perform one evaluation": "Checkpoint to measure",
    "Run inference": "Checkpoint to predict with",
    "Write ": "Input and output",
}
"""How Lightning and jsonargparse name groups, the first line of a docstring, and how we do."""


class Formatter(DefaultHelpFormatter):
    """Options without the markup of docstrings, and without defaults and classes that are named elsewhere."""

    @override
    def start_section(self, heading: str | None) -> None:
        super().start_section(next((ours for text, ours in _HEADINGS.items() if (heading or "").startswith(text)), heading))

    @override
    def _get_help_string(self, action: Action) -> str:
        text = plain(super()._get_help_string(action) or "")
        if action.default is not None:  # it is in the parentheses that follow
            text = re.sub(r"\s+Default: [^.]*\.(?= \()", "", text)
        if action.dest not in ("model", "data"):
            text = re.sub(r", known subclasses: .*\)$", f"; classes: --{action.dest}.help)", text)
        return text
