"""What is installed: versions, extras, the command, and the files of a wheel."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import lightning_liger

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest there

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEPENDENCIES = {requirement.name: requirement for requirement in map(Requirement, PROJECT["dependencies"])}
EXTRAS = PROJECT["optional-dependencies"]
DEVELOPMENT = {line.name: line for line in map(Requirement, EXTRAS["docs"] + EXTRAS["dev"])}
PINNED = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def test_version_is_in_one_place_and_in_the_changelog():
    assert "version" in PROJECT["dynamic"]
    version = lightning_liger.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", version)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## [{version}]" in changelog


def test_versions_that_are_supported():
    for version in ("2.6.2", "2.6.3"):  # compromised: excluded by name and not only by the bound, which may be lowered
        assert f"!={version}" in str(DEPENDENCIES["lightning"].specifier).split(",")
    python = SpecifierSet(PROJECT["requires-python"])
    assert python.contains("3.10")
    assert not python.contains("3.9")


def test_pinned_versions_are_those_that_the_project_accepts():
    for pinned in PINNED:
        (specifier,) = pinned.specifier
        assert specifier.operator == "=="
        # pytorch-lightning is lightning's twin, which torchmetrics and others pull in.
        name = "lightning" if pinned.name == "pytorch-lightning" else pinned.name
        assert (DEPENDENCIES | DEVELOPMENT)[name].specifier.contains(specifier.version), pinned


def test_upper_bounds_follow_what_the_tests_passed_with():
    raised = runpy.run_path(str(ROOT / ".ci" / "bounds.py"))["raised"]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = {name: re.search(r"<(\d+)\.(\d+)", str(each.specifier)) for name, each in DEPENDENCIES.items()}
    bounded = {name: (int(each[1]), int(each[2])) for name, each in found.items() if each}
    assert bounded.keys() == {"torch", "triton", "lightning", "transformers"}
    assert raised(text, {name: f"{major}.{minor - 1}.3" for name, (major, minor) in bounded.items()}) == (text, [])
    newest = {name: f"{major}.{minor}.1+cpu" for name, (major, minor) in bounded.items()} | {"torch": "3.0.0rc1"}
    del newest["triton"]
    written, changes = raised(text, newest)
    assert [change.split(":")[0] for change in changes] == list(newest)
    requirements = {each.name: each for each in map(Requirement, tomllib.loads(written)["project"]["dependencies"])}
    for name, before in DEPENDENCIES.items():
        after = requirements[name]
        if name not in newest:
            assert after == before
            continue
        major, minor, *_ = newest[name].split(".")
        assert after.specifier.contains(f"{major}.{minor}.9")
        assert not after.specifier.contains(f"{major}.{int(minor) + 1}.0")
        assert {each for each in before.specifier if each.operator != "<"} < set(after.specifier)


def test_workflows_and_the_readme_call_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    workflows = [ROOT / ".ci" / "run", ROOT / "README.md", *sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
    for workflow in workflows:
        text = workflow.read_text(encoding="utf-8")
        targets = re.findall(r"(?:^ *|run: |`)make (\w+)(?:$|`| 2>&1)", text, flags=re.MULTILINE)
        assert targets, workflow.name
        assert [target for target in targets if f"\n{target}:" not in makefile] == []
    assert {"lint", "test", "smoke", "site"} <= set(re.findall(r"^make (\w+)$", workflows[0].read_text(), re.MULTILINE))


def test_actions_are_pinned_by_hash_with_their_version():
    lines = [
        (path.name, line.strip().removeprefix("- "))
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"\buses:", line)
    ]
    assert {name for name, _ in lines} >= {"ci.yml", "release.yml", "newest.yml", "gpu.yml"}
    pinned = r"uses: ([\w-]+/[\w-]+@[0-9a-f]{40}) # (v\d+\.\d+\.\d+)"
    assert [line for line in lines if not re.fullmatch(pinned, line[1])] == []
    hashes = {re.fullmatch(pinned, line).groups() for _, line in lines}
    assert len(hashes) == len({action.split("@")[0] for action, _ in hashes})  # one version of each


def test_newest_versions_are_tried_each_week_and_break_into_an_issue():
    newest, gpu = (
        yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
        for name in ("newest.yml", "gpu.yml")
    )
    assert newest[True]["schedule"]  # YAML reads "on" as a boolean
    assert newest["permissions"] == {"contents": "read", "issues": "write"}
    bounds = newest["jobs"]["bounds"]  # which alone may write, and runs nothing that was installed
    assert (bounds["needs"], "pip" in bounds["steps"][-1]["run"]) == ("newest", False)
    *_, tests, passed, issue = newest["jobs"]["newest"]["steps"]
    assert "versions=" in passed["run"]
    assert "make newest" in tests["run"]
    assert (issue["if"], "gh issue create" in issue["run"]) == ("failure()", True)
    assert "pull_request" not in gpu[True]  # whose code must not run on a machine of one's own
    assert "self-hosted" in gpu["jobs"]["gpu"]["runs-on"]
    assert (gpu["permissions"], "permissions" in gpu["jobs"]["gpu"]) == ({"contents": "read"}, False)
    history = gpu["jobs"]["history"]
    assert (history["needs"], history["runs-on"]) == ("gpu", "ubuntu-latest")


def test_history_of_benchmarks_grows_by_a_file_for_each_commit(tmp_path):
    """The script of the workflow, twice: without the branch, and with it."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text(encoding="utf-8"))
    script = workflow["jobs"]["history"]["steps"][-1]["run"]

    def git(*arguments, cwd=tmp_path):
        return subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True).stdout

    git("init", "--bare", "-b", "main", "forge")
    git("clone", "forge", "first")
    (tmp_path / "first" / "code.py").write_text("1\n")
    git("add", ".", cwd=tmp_path / "first")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "code", cwd=tmp_path / "first")
    git("push", "origin", "HEAD:main", cwd=tmp_path / "first")
    for name in ("a", "b"):
        git("clone", "--depth", "1", f"file://{tmp_path}/forge", name)
        (tmp_path / name / "history").mkdir()
        (tmp_path / name / "history" / f"{name}.jsonl").write_text("{}\n")
        environment = {**os.environ, "GITHUB_SHA": name}
        subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path / name, env=environment, check=True)
    assert git("ls-tree", "--name-only", "benchmark-history", cwd=tmp_path / "forge").split() == ["a.jsonl", "b.jsonl"]
    assert git("rev-list", "--count", "benchmark-history", cwd=tmp_path / "forge").strip() == "2"


def test_files_of_the_repository_can_be_read_and_name_what_they_should():
    read = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github").rglob("*.yml")}
    assert {"ci.yml", "release.yml", "bug.yml", "feature.yml"} <= set(read)
    doctor = next(field for field in read["bug.yml"]["body"] if field.get("id") == "doctor")
    assert "lightning-liger doctor" in str(doctor)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["title"], citation["license"]) == (PROJECT["name"], PROJECT["license"])


def test_wheel_holds_both_packages_and_nothing_else(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".venv", ".git", "runs")
    for name in ("lightning_liger", "kernels", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]):
        shutil.copy(ROOT / name, source / name)
    command = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        described = {name.split(".dist-info/")[1] for name in archive.namelist() if ".dist-info/" in name}
        info = f"lightning_liger-{lightning_liger.__version__}.dist-info"
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    expected = {
        str(file.relative_to(root))
        for root, package in ((ROOT, "lightning_liger"), (ROOT / "kernels", "liger_ops"))
        for file in (root / package).rglob("*.py")
    }
    # `lightning-liger init` copies the examples, code and data included, but for two studies.
    left_out = {"__pycache__", "next_item", "ranking"}
    examples = [path for path in (ROOT / "examples").rglob("*") if path.is_file() and left_out.isdisjoint(path.parts)]
    examples = {f"lightning_liger/{path.relative_to(ROOT)}" for path in examples}
    expected |= {name for name in examples if name.endswith(".py")}
    assert {name for name in files if name.endswith(".py")} == expected
    assert {name.split("/")[0] for name in files} == {"lightning_liger", "liger_ops"}
    assert "lightning-liger = lightning_liger.cli:main" in entry_points
    assert examples | {"lightning_liger/py.typed", "liger_ops/py.typed"} <= files
    assert "licenses/LICENSE" in described
    assert [name for name in files if "test" in name] == []
