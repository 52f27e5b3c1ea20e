"""A hook of mkdocs: what the site has besides the pages in docs/.

- Pages from the root of the repository (``ROOT_PAGES``), and files that pages link to, such as plots and yaml files.
- A page of docstrings for each part of the public API, read from ``__all__`` of the packages.
- Drawings (svg) as part of the page, so that they follow its colours.

Links in pages are those of the repository, and work on the forge; here they become links of the site.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
}
API = {
    "lightning_liger.strategies": "Strategies",
    "lightning_liger.callbacks": "Callbacks",
    "lightning_liger.monitor": "Monitor",
    "lightning_liger.estimate": "Memory estimates",
    "lightning_liger.patching": "Patching models",
    "lightning_liger.training": "Training",
    "lightning_liger.post_training": "Post-training",
    "lightning_liger.losses": "Losses",
    "lightning_liger.lazy": "Lazy logits and scores",
    "lightning_liger.sequences": "Sequences",
    "lightning_liger.weights": "Weights",
    "lightning_liger.data": "Data modules",
    "liger_ops": "liger_ops: functions",
    "liger_ops.nn": "liger_ops.nn: modules",
}
"""The pages of the API: the folder that public names are imported from, and the title."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`(?!\]))", flags=re.DOTALL | re.MULTILINE)
_DRAWING = re.compile(r'<img alt="([^"]*)" src="[^"]*?(images/\w+\.svg)"\s*/?>')


def exported_names() -> dict[str, list[str]]:
    """The public names of each page of the API, as ``package.name``.

    Raises:
        ValueError: For a name that belongs to no page: a folder is missing in ``API``.
    """
    pages: dict[str, list[str]] = {folder: [] for folder in API}
    for package, path in (
        ("lightning_liger", "lightning_liger/__init__.py"),
        ("lightning_liger.data", "lightning_liger/data/__init__.py"),
        ("liger_ops", "kernels/liger_ops/__init__.py"),
        ("liger_ops.nn", "kernels/liger_ops/nn.py"),
    ):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        sources = {
            alias.asname or alias.name: str(node.module)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        (names,) = (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        )
        for name in names:
            origin = package if package in API else sources[name]
            page = max((each for each in API if f"{origin}.".startswith(f"{each}.")), key=len, default=None)
            if page is None:
                raise ValueError(f"{package}.{name} is from {origin}, which has no page in API of {__file__}")
            pages[page].append(f"{package}.{name}")
    return {page: names for page, names in pages.items() if names}


def on_config(config: MkDocsConfig) -> None:
    """Writes out the folders in nav."""
    index = ROOT / "docs" / "examples" / "index.md"
    linked = re.findall(r"\]\((\w+\.md)\)", index.read_text(encoding="utf-8")) if index.exists() else []
    pages = {
        "examples/": [f"examples/{page}" for page in ["index.md", *dict.fromkeys(linked)]],
        "api/": [{title: _api_page(folder)} for folder, title in API.items() if folder in exported_names()],
    }
    config.nav = _expanded(config.nav, pages)


def _expanded(nav: Any, pages: dict[str, list[Any]]) -> Any:
    if isinstance(nav, list):
        return [_expanded(each, pages) for each in nav]
    if isinstance(nav, dict):
        return {title: _expanded(each, pages) for title, each in nav.items()}
    return pages.get(nav, nav)


def _api_page(folder: str) -> str:
    return f"api/{folder.replace('.', '_')}.md"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages that are not in docs/."""
    for path, uri in ROOT_PAGES.items():
        if files.get_file_from_path(uri) is None and (ROOT / path).exists():
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for folder, names in exported_names().items():
        blocks = "\n".join(f"::: {name}\n" for name in names)
        files.append(File.generated(config, _api_page(folder), content=f"# {API[folder]}\n\n{blocks}"))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links of the repository into links of the site."""
    origins = {uri: path for path, uri in ROOT_PAGES.items() if uri != "index.md"}
    origin = origins.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def of_site(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        target, _, anchor = link.partition("#")
        if "://" in link or not target or link.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if not (ROOT / path).exists():
            return match[0]  # a page made here, or an error that mkdocs reports
        if (ROOT / path).is_dir():
            return text
        uri = ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}")
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        relative = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{image}[{text}]({relative}{'#' if anchor else ''}{anchor})"

    parts = _CODE.split(markdown)
    return "".join(part if index % 2 else _LINK.sub(of_site, part) for index, part in enumerate(parts))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts drawings into the page."""

    def inlined(match: re.Match[str]) -> str:
        drawing = (ROOT / "docs" / match[2]).read_text(encoding="utf-8")
        return re.sub(r"^<\?xml.*?\?>\s*", "", drawing)

    return _DRAWING.sub(inlined, html)
