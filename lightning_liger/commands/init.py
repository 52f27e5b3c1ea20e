"""``lightning-liger init RECIPE``: a commented yaml to start from, with the data that it reads.

The yaml files are those of ``examples/``, which are data of this package.
"""

import collections
import re
import shutil
import textwrap
from pathlib import Path

from lightning_liger.cli.messages import PROGRAM, closest
from lightning_liger.commands.writing import check_output, write_files

EXAMPLES = Path(__file__).parents[1] / "examples"
_PATH = re.compile(r"(?<!docs/)\bexamples/([\w./-]*\w)")
_MODULE = re.compile(r"\bexamples\.(\w+)")


def run_init(recipe: str | None = None, *, output: str | None = None) -> int:
    """Write a commented yaml to start from, with the data that it reads, or list the recipes.

    Args:
        recipe: The name of a recipe, such as ``sft``; without one, all are listed.
        output: The yaml file to write, by default RECIPE.yaml in this folder. Data is written next to it.
    """
    found = recipes()
    if recipe is None:
        width = 2 + max(map(len, found))
        wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns, subsequent_indent=" " * (2 + width))
        print("Recipes:")
        for name in sorted(found):
            wrapper.initial_indent = f"  {name:{width}}"
            print(wrapper.fill(found[name].read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")))
        print(f"\nWrite one: {PROGRAM} init RECIPE [--output FILE]")
        return 0
    if recipe not in found:
        raise ValueError(f"recipe must be one that `{PROGRAM} init` lists, got {recipe!r}{closest(recipe, found)}")
    output = f"{recipe}.yaml" if output is None else output
    written, path = write_recipe(found[recipe], output), Path(output)
    folders = collections.Counter(file.parent for file in written)
    names = dict.fromkeys(file if folders[file.parent] < 5 else file.parent for file in written if file != path)
    for each in (path, *names):
        print(f"wrote {each}" + (f" ({folders[each]} files)" if each in folders and each != path else ""))
    print(f"\nNext: {PROGRAM} fit --config {path}")
    return 0


def recipes() -> dict[str, Path]:
    """The yaml files of ``examples/``, and those of folders in it that have the name of their folder, by name."""
    paths = [*EXAMPLES.glob("*.yaml"), *(path for path in EXAMPLES.glob("*/*.yaml") if path.stem == path.parent.name)]
    return {path.stem: path for path in sorted(paths)}


def write_recipe(recipe: Path, output: str) -> list[Path]:
    """Writes the yaml ``recipe`` to ``output``, and the files of ``examples/`` that it names next to it.

    Returns the files written. Data that is there already with the same contents is left as it is.
    """
    check_output(output)
    file, folder = Path(output), Path(output).parent
    if file.suffix not in (".yaml", ".yml"):
        raise ValueError(f"output must be the name of a yaml file, got {output!r}")
    text = recipe.read_text(encoding="utf-8")
    if _MODULE.search(text) and folder.resolve() != Path.cwd():
        raise ValueError(f"output must be in this folder, whose Python code the yaml names, got {output!r}")
    files = {file: _moved(text, folder, {recipe.relative_to(EXAMPLES).as_posix(): file}).encode()}
    for source in sorted(_named_files(text, seen={recipe})):
        is_text = source.suffix in (".py", ".yaml")
        content = _moved(source.read_text(encoding="utf-8"), folder, {}).encode() if is_text else source.read_bytes()
        files[folder / source.relative_to(EXAMPLES)] = content
    for path, content in files.items():
        if path.exists() and (path == file or not path.is_file() or path.read_bytes() != content):
            raise FileExistsError(f"{str(path)!r} exists already: delete it, or choose another --output")
    missing = {path: content for path, content in files.items() if not path.exists()}
    write_files(missing)
    return list(missing)


def _moved(text: str, folder: Path, renamed: dict[str, Path]) -> str:
    """``text`` with names of files in ``examples/`` as names in ``folder``."""
    text = _PATH.sub(lambda name: str(renamed.get(name[1]) or folder / name[1]), text)
    return _MODULE.sub(r"\1", text)


def _named_files(text: str, seen: set[Path]) -> set[Path]:
    """The files of ``examples/`` that a text names, and those that these name."""
    found = {EXAMPLES / name for name in _PATH.findall(text) + _MODULE.findall(text)}
    files = {file for path in found for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()}
    files = {file for file in files if "__pycache__" not in file.parts} - seen
    seen |= files
    texts = [file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".yaml")]
    return files.union(*(_named_files(each, seen) for each in texts))
