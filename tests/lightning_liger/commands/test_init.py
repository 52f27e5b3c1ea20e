"""``lightning-liger init`` writes yaml files that run as they are."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from lightning_liger.cli import main
from lightning_liger.commands import init
from lightning_liger.commands.init import recipes, run_init, write_recipe
from lightning_liger.hub import is_hub_name

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-liger"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_recipes_are_the_yaml_files_of_examples_and_listed_with_their_first_comment(capsys):
    assert {path.stem for path in (ROOT / "examples").glob("*.yaml")} <= set(recipes())
    assert "liger_fsdp" not in recipes()  # an addition to others
    assert main(["init"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name, path in recipes().items():
        assert f"{name} {path.read_text(encoding='utf-8').splitlines()[0].removeprefix('# ')}" in printed


@pytest.mark.parametrize("folder", [".", "made"])
def test_written_yaml_differs_in_names_of_files_only(folder, tmp_path):
    Path(folder).mkdir(exist_ok=True)
    for name, path in recipes().items():
        if folder != "." and "examples." in path.read_text(encoding="utf-8"):
            continue  # its Python code is found in the current folder only
        output = Path(folder) / f"{name}.yaml"
        write_recipe(path, str(output))
        text = output.read_text(encoding="utf-8")
        pages = re.findall(r"docs/[\w/]+\.md", text)
        assert all((ROOT / page).is_file() for page in pages)
        assert "examples/" not in text.replace("docs/examples/", "")
        assert f"lightning-liger fit --config {output}" in text
        data = yaml.safe_load(text)["data"]["init_args"]
        named = [data[key] for key in ("path", "tokenizer") if data.get(key)]
        assert all(Path(each).exists() or is_hub_name(each) for each in named)


def test_written_story_trains_in_an_empty_folder(capsys):
    assert main(["init", "sft", "--output=my.yaml"]) == 0
    assert "Next: lightning-liger fit --config my.yaml" in capsys.readouterr().out
    assert main(["fit", "--config=my.yaml", "--trainer.max_steps=1", "--trainer.accelerator=cpu"]) == 0
    assert Path("runs/sft/checkpoints").is_dir()
    assert not Path("data/images").exists()


def test_nothing_is_overwritten():
    run_init("sft")
    with pytest.raises(FileExistsError, match=r"'sft\.yaml' exists already: delete it, or choose another --output"):
        run_init("sft")
    run_init("kto")  # shares the tokenizer
    assert Path("data/feedback.jsonl").is_file()
    Path("data/tokenizer/tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(FileExistsError, match="tokenizer"):
        run_init("dpo")
    assert not Path("dpo.yaml").exists()


def test_code_and_the_files_that_it_names_are_written(tmp_path, monkeypatch):
    examples = tmp_path / "shipped"
    (examples / "course").mkdir(parents=True)
    (examples / "course" / "course.yaml").write_text(
        "# A course.\n#   fit --config examples/course/course.yaml\nmodel: {class_path: examples.course.Model}\n"
    )
    (examples / "course" / "__init__.py").write_text("from examples.course.model import Model\n")
    (examples / "course" / "model.py").write_text("LOG = 'examples/course/log.txt'\n")
    (examples / "course" / "log.txt").write_text("examples/course")
    monkeypatch.setattr(init, "EXAMPLES", examples)
    (examples / "course" / "large.yaml").write_text("# An addition.\n")
    assert list(recipes()) == ["course"]
    monkeypatch.chdir(tmp_path)
    write_recipe(examples / "course" / "course.yaml", "mine.yaml")
    assert "fit --config mine.yaml" in Path("mine.yaml").read_text()
    assert "class_path: course.Model" in Path("mine.yaml").read_text()
    assert Path("course/__init__.py").read_text() == "from course.model import Model\n"
    assert Path("course/model.py").read_text() == "LOG = 'course/log.txt'\n"
    assert Path("course/log.txt").read_text() == "examples/course"
    with pytest.raises(ValueError, match="output must be in this folder"):
        write_recipe(examples / "course" / "course.yaml", f"{tmp_path}/shipped/mine.yaml")
