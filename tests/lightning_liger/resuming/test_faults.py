"""After SIGTERM, SIGKILL or a full disk, training resumes from the checkpoints that are left."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.lightning_liger.resuming.test_rank_state import TOLERANCE, assert_goes_on
from tests.lightning_liger.resuming.workers.faults import FAULT_AT, FAULTS, SIGTERMS, WAYS, Signaled
from tests.lightning_liger.resuming.workers.resume import NUM_BATCHES, Run, fit, num_left
from tests.lightning_liger.strategies.workers.distributed import NUM_RANKS, ROOT, launch, python_path

WORKER = "tests.lightning_liger.resuming.workers.faults"
SECONDS = 200
SIGNALED = ("batch", FAULT_AT[0], FAULT_AT[1] + 1)
"""Where several ranks stop of which one got SIGTERM: after the next batch, in the middle of a step."""
SAVED = ("batch", 0, NUM_BATCHES - 1)
"""The last checkpoint before the fault: after the fourth optimizer step, the last of the first epoch."""


# One process


def test_sigterm_saves_and_the_exit_code_tells(tmp_path):
    uninterrupted = fit(tmp_path, strategy="liger")
    saves = ModelCheckpoint(dirpath=tmp_path, filename="sigterm", save_on_exception=True)
    callbacks = [saves, Signaled(signal.SIGTERM, [0], at=SIGNALED[1:])]
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException) as error:
        fit(tmp_path, strategy="liger", callbacks=callbacks, enable_checkpointing=True)
    assert error.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == handler
    run = fit(tmp_path, strategy="liger", seed=90, ckpt_path=tmp_path / "sigterm.ckpt")
    assert_goes_on(run, uninterrupted, num_left(SIGNALED))


# Several processes


def _run_program(folder: Path, device: str, fault: str) -> tuple[int, str]:
    """The exit code and the output of one command, whose other processes Lightning starts."""
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name and "MASTER" not in name}
    environment["PYTHONPATH"] = python_path()
    command = [sys.executable, "-m", WORKER, device, str(folder), fault]
    ended = subprocess.run(command, env=environment, cwd=ROOT, timeout=SECONDS, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


def _wait_until_ended(folder: Path, fault: str) -> None:
    """Waits for every process of a program."""
    deadline = time.monotonic() + SECONDS
    for rank in range(NUM_RANKS):
        pid = int((folder / f"{fault}-{rank}.pid").read_text())
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline
                time.sleep(0.1)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def programs(request, tmp_path_factory):
    """The device, the folder, and how each program ended."""
    folder = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor() as pool:
        running = {fault: pool.submit(_run_program, folder, request.param, fault) for fault in FAULTS}
    return request.param, folder, {fault: program.result() for fault, program in running.items()}


@pytest.fixture(scope="module")
def ranks(programs):
    """What all ranks got out of every run, after the programs."""
    device, folder, _ = programs
    return device, launch(device, folder, worker=WORKER), folder


@pytest.mark.parametrize("fault", ["kill-0", "kill-1"])
def test_killed_rank_ends_the_program_and_every_process_of_it(programs, ranks, fault):
    device, folder, ended = programs
    assert ended[fault][0] != 0, ended[fault][1]
    _wait_until_ended(folder, fault)
    # Whole checkpoints only, and nothing that was begun, from which training goes on.
    assert sorted(path.name for path in (folder / fault).iterdir()) == ["last.ckpt", "step=4.ckpt"]
    assert torch.load(folder / fault / "last.ckpt", weights_only=True)["global_step"] == 4
    for result in ranks[1]:
        uninterrupted = Run(**result["liger_fsdp"]["uninterrupted"])
        assert_goes_on(Run(**result[fault]), uninterrupted, num_left(SAVED), TOLERANCE[device])


def test_sigterm_to_the_program_ends_all_of_its_processes_with_a_checkpoint(programs):
    _, folder, ended = programs
    assert ended["sigterm"][0] == 128 + signal.SIGTERM, ended["sigterm"][1]
    _wait_until_ended(folder, "sigterm")
    checkpoint = torch.load(folder / "sigterm" / "last.ckpt", weights_only=True)
    assert checkpoint["epoch"] == FAULT_AT[0]
    # The step whose first micro-batch it ended after starts again.
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    assert progress["completed"] == progress["processed"] == FAULT_AT[1] + 1


@pytest.mark.parametrize(("way", "to"), [(way, to) for way, to, _ in SIGTERMS])
def test_sigterm_to_any_rank_ends_all_at_the_same_batch_and_training_goes_on(ranks, way, to):
    device, results, _ = ranks
    for result in results:
        run = result[way][f"sigterm-{to}"]
        assert (run["error"], run["exit_code"]) == (SIGTERMException, 128 + signal.SIGTERM)
        uninterrupted = Run(**result[way]["uninterrupted"])
        assert_goes_on(Run(**run["resumed"]), uninterrupted, num_left(SIGNALED), TOLERANCE[device])


@pytest.mark.parametrize("way", WAYS)
def test_full_disk_of_one_rank_is_an_error_on_all_and_the_checkpoint_before_is_whole(ranks, way):
    _, results, folder = ranks
    for result in results:
        error = result[way]["full-disk"]
        assert isinstance(error, RuntimeError)
        assert "last.ckpt" in str(error)
        assert "File too large" in str(error)
        assert result[way]["after-full-disk"] == ["last.ckpt", "step=4.ckpt", "step=8.ckpt"]
    path = folder / way / "last.ckpt"
    checkpoint = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=True)
    assert checkpoint["global_step"] == 8
