"""Wrong arguments of ``lightning-liger bench``."""

from typing import Any

from lightning_liger.commands.bench import run_bench
from tests.bad_inputs import BadInput


def bench(argument: str, value: Any, *mentions: str) -> BadInput:
    return BadInput(
        f"run_bench-{argument}-{value}",
        lambda: run_bench("--config=a.yaml", **{argument: value}),
        (argument, *mentions),
    )


BAD_INPUTS = [
    bench("arms", "of", "'of'", "'off', 'on'"),
    bench("arms", "", "''", "'off', 'on'"),
    bench("memory_budget", "auto,-1", "'auto,-1'", "positive numbers"),
    bench("memory_budget", "half", "'half'", "'auto'"),
    bench("steps", 0, "at least 1", "0"),
    bench("warm_up", -1, "at least 0", "-1"),
    bench("time_limit", 0, "above 0", "0"),
    bench("output", "", "a path", "''"),
    BadInput(
        "run_bench-output-file",
        lambda: run_bench("--config=a.yaml", output=__file__),
        ("output must be a folder", "File exists"),
        OSError,
    ),
    BadInput("run_bench-config-missing", lambda: run_bench("--trainer.devices=2"), ("--config", "user.yaml")),
]
