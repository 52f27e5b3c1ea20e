"""``python -m benchmarks losses``: every contender computes the same loss, and wrong ones are marked."""

import dataclasses
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from benchmarks import docs_sections
from benchmarks.__main__ import main
from benchmarks.cases import Maker, Unavailable
from benchmarks.losses import measure, others
from benchmarks.losses.data import Data, with_ids, with_rollouts
from benchmarks.losses.measure import OK, OUT_OF_MEMORY, WRONG, Measurement, Settings
from benchmarks.losses.problems import PROBLEMS, TINY
from benchmarks.records import read_results

CPU = torch.device("cpu")


def test_losses_writes_records_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["losses", "--quick", "--against", "eager", "--repeats", "2", "--out", f"{tmp_path}/"]) == 0
    results = read_results(tmp_path / "losses.jsonl")
    assert results.command == "losses"
    found = [Measurement(**line) for line in results.lines]
    assert list(dict.fromkeys(one.problem for one in found)) == list(PROBLEMS)
    assert [(one.problem, one.contender, one.error) for one in found if one.status != OK] == []
    # With the numbers that torch 2.11 draws, eager code's gradient of total variation is off by 0.067 too.
    most = 0.1 if Version(torch.__version__) < Version("2.12") else 0.05
    assert all(one.wall_ms > 0 and one.gradient_error < most for one in found)
    assert "log-probabilities, head trained" in capsys.readouterr().out
    section = docs_sections.losses(tmp_path / "losses.jsonl")
    assert section.startswith("Forward and backward, wall ms / peak MiB beyond the inputs")
    assert section.count("\n| ") == 2 + len(PROBLEMS)
    (row,) = (line for line in section.splitlines() if line.startswith("| GRPO, head frozen | 4 x 8,"))
    assert [cell.strip() == "-" for cell in row.strip("|").split("|")[3:]] == [True] * 3 + [False] + [True] * 2


def _gradients_doubled(data: Data) -> Tensor:
    loss = PROBLEMS["top16"].calls["eager"](data)
    return 2 * loss - loss.detach()


def _no_memory(data: Data) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("call", "status", "error"),
    [
        (_gradients_doubled, WRONG, "gradient differs"),
        (lambda data: PROBLEMS["top16"].calls["eager"](data) + 1000, WRONG, "value differs"),
        (_no_memory, OUT_OF_MEMORY, ""),
        (lambda data: data.missing, "failed", "AttributeError"),
    ],
)
def test_wrong_results_and_errors_are_marked(
    call: object, status: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = dataclasses.replace(PROBLEMS["top16"], calls=PROBLEMS["top16"].calls | {"ours": call})
    monkeypatch.setitem(PROBLEMS, "top16", problem)
    (found,) = measure.measure(("top16",), Settings(CPU, (), repeats=2, quick=True), print)
    assert found.status == status
    assert (found.error or "").startswith(error)
    assert (found.wall_ms is not None) == (status == WRONG)
    assert call is not _gradients_doubled or found.gradient_error == pytest.approx(1, abs=0.02)


def test_packages_that_are_missing_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> None:
        raise Unavailable("trl is not installed")

    monkeypatch.setattr(others, "trl_kernel", missing)
    said: list[str] = []
    settings = Settings(CPU, ("trl",), repeats=2, quick=True)
    found = list(measure.measure(("entropy", "entropy_frozen"), settings, said.append))
    assert {one.contender for one in found} == {"ours"}
    assert said == ["trl is skipped: trl is not installed"]


def test_ids_of_a_token_differ_and_no_ratio_is_close_to_a_clip_bound() -> None:
    data = with_rollouts(Maker(CPU), TINY, True)
    assert all(len(set(ids)) == 100 for ids in with_ids(Maker(CPU), TINY, True, k=100).ids.tolist())
    found = PROBLEMS["grpo"].calls["eager"].args[0](data.hidden_states, data.weight, data.labels)
    ratios = (found - data.old_log_probs).exp()
    assert ((ratios - 1).abs() < 0.1).sum() == 3 * TINY.num_tokens // 4
    assert ((ratios < 0.6) | (ratios > 1.6)).sum() == TINY.num_tokens // 4
