"""Arms, jobs, and the processes that run jobs."""

import argparse
import dataclasses
import sys
import time

import pytest

from benchmarks.training.arms import Arm, parse_arms, parse_numbers
from benchmarks.training.job import FAILED, OUT_OF_MEMORY, Job
from benchmarks.training.processes import run_jobs

JOB = Job("llama3_8b", "ours:full", ((2, 16), (4, 16)), devices=2, tiny=True)

# A program in place of the worker, which imports nothing. What each rank does depends on the seed of the job.
PROGRAM = """
import json, os, sys, time
line = sys.stdin.readline()
if not line.strip():
    sys.exit()
task = json.loads(line)
job, rank = json.loads(task["job"]), int(os.environ.get("LOCAL_RANK", "0"))
row = {"model": job["model"], "layers": 2, "arm": job["arm"], "devices": job["devices"], "sequence_length": 16}
with open(f"{task['out']}.{rank}", "w") as out:
    for size, _ in job["shapes"]:
        found = {"batch_size": size, "tokens_per_second": 10.0 - rank, "peak_gib": float(rank), "losses": [rank]}
        found["step_seconds"] = [1.0 + rank, 2.0 - rank]
        if job["seed"] == 1 and size == 4 and rank == 1:
            out.write(json.dumps(row | {"batch_size": size, "status": "out of memory"}) + "\\n")
            break
        if job["seed"] == 2 and rank == 0:
            print("a line\\nSegmentation fault")
            sys.exit(9)
        if job["seed"] == 3:
            time.sleep(60)
        out.write(json.dumps(row | found) + "\\n")
        out.flush()
"""
COMMAND = (sys.executable, "-S", "-c", PROGRAM)


def test_jobs_run_one_after_another_with_a_row_for_each_shape() -> None:
    """Of two ranks, one of which runs out of memory, a process that dies, and one without an end."""
    jobs = [JOB, *(dataclasses.replace(JOB, seed=seed) for seed in (1, 2)), dataclasses.replace(JOB, devices=1)]
    rows = list(run_jobs(jobs, command=COMMAND))
    assert [(row.devices, row.batch_size, row.status) for row in rows] == [
        *((2, 2, "ok"), (2, 4, "ok"), (2, 2, "ok"), (2, 4, OUT_OF_MEMORY), (2, 2, FAILED), (1, 2, "ok"), (1, 4, "ok"))
    ]
    assert (rows[0].tokens_per_second, rows[0].peak_gib, rows[0].losses) == (9.0, 1.0, [0.5])
    assert (rows[0].step_seconds, rows[0].reserved_gib) == ([2.0, 2.0], None)
    assert rows[4].error == "Segmentation fault"
    start = time.monotonic()
    (row,) = run_jobs([dataclasses.replace(JOB, seed=3)], command=COMMAND, timeout=0.5)
    assert (row.status, row.error) == (FAILED, "no result within 0.5 seconds")
    assert time.monotonic() - start < 30


def test_arguments_are_parsed() -> None:
    assert Job.from_json(JOB.to_json()) == JOB
    for text, arguments in {
        "ours": {},
        "ours:none": {"activation_checkpointing": "none"},
        "ours_fsdp2:8": {"activation_checkpointing": 8},
        "ours:auto": {"memory_budget": "auto"},
        "ours:61.3GiB": {"memory_budget": 61.3},
        "ours:0.8": {"memory_budget": 0.8},
    }.items():
        arm = Arm.parse(text)
        assert (arm.strategy_arguments, str(arm), arm.recomputes_all) == (arguments, text, False)
    arms = parse_arms("hf:full, liger_kernel:full,hf:none,hf")
    assert [arm.recomputes_all for arm in arms] == [True, True, False, False]  # by Hugging Face
    for text in ("ours_fp8:72.9GiB", "ours_fsdp2_fp8:full", "ours_fp8_gw_hp"):
        arm = Arm.parse(text)
        assert (arm.is_ours, arm.strategy_arguments) == (True, Arm.parse(f"ours:{arm.plan}").strategy_arguments)
    for text in ("hf:auto", "liger_kernel:8", "ours:all", "ours:1.5", "ours:-1", "eager"):
        with pytest.raises(argparse.ArgumentTypeError):
            Arm.parse(text)
    assert parse_numbers("512,4k, 256k") == (512, 4096, 262144)
