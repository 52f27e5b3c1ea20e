"""A hook of mkdocs: what the site has besides the pages in docs/.

- Pages from the root of the repository (``ROOT_PAGES``), and files that pages link to, such as plots and yaml files.
- A page of docstrings for each part of the public API, read from ``__all__`` of the packages.
- Drawings (svg) as part of the page, so that they follow its colors.

Links in pages are those of the repository, and work on the forge; here they become links of the site.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

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
    "lightning_liger.activations": "Activations",
    "lightning_liger.weights": "Weights",
    "lightning_liger.data": "Data modules",
    "liger_ops": "liger_ops: functions",
    "liger_ops.nn": "liger_ops.nn: modules",
    "liger_ops.optim": "liger_ops.optim: optimizers",
}
"""The pages of the API: the folder that public names are imported from, and the title."""
PACKAGES = {
    "lightning_liger": "lightning_liger/__init__.py",
    "lightning_liger.data": "lightning_liger/data/__init__.py",
    "lightning_liger.estimate": "lightning_liger/estimate/__init__.py",
    "lightning_liger.monitor": "lightning_liger/monitor/__init__.py",
    "liger_ops": "kernels/liger_ops/__init__.py",
    "liger_ops.nn": "kernels/liger_ops/nn.py",
    "liger_ops.optim": "kernels/liger_ops/optim/__init__.py",
}
"""Packages and modules with public names, and their files."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`(?!\]))", flags=re.DOTALL | re.MULTILINE)
_EXAMPLE = re.compile(r"examples/[\w/]+\.(?:yaml|py)")
_FETCHED = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="https?://[^>]*>')
_DRAWING = re.compile(r'<img alt="[^"]*" src="[^"]*?(images/\w+\.svg)"\s*/?>')
_PLOT = re.compile(r'<img alt="[^"]*" src="[^"]*\.png"\s*/?>')


def exported_names() -> dict[str, list[str]]:
    """The public names of each page of the API, as ``package.name``.

    Raises:
        ValueError: For a name that belongs to no page: a folder is missing in ``API``.
    """
    pages: dict[str, list[str]] = {folder: [] for folder in API}
    exported = _exports("lightning_liger")
    for package, path in PACKAGES.items():
        for name, source in _exports(package).items():
            if package.startswith("lightning_liger.") and name in exported:
                continue
            origin = package if package in API else source
            page = max((each for each in API if f"{origin}.".startswith(f"{each}.")), key=len, default=None)
            if page is None:
                raise ValueError(f"{package}.{name} is from {origin}, which has no page in API of {__file__}")
            hidden = (ROOT / path).parent.joinpath(name).is_dir()  # a folder of the same name would be shown
            pages[page].append(f"{source if hidden else package}.{name}")
    return {page: sorted(names, key=_place) for page, names in pages.items() if names}


def _exports(package: str) -> dict[str, str]:
    """The names in ``__all__`` of a package, each with the module that it is imported from."""
    path = ROOT / PACKAGES[package]
    if not path.exists():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    sources = {
        alias.asname or alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lists = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    return {name: sources.get(name, package) for names in lists for name in names}


def _place(path: str) -> tuple[bool, ...]:
    """Functions of liger_ops come before what they return, classes of the Trainer before those of Fabric."""
    name = path.rpartition(".")[2]
    return name.startswith("Fabric"), name.isupper(), path.startswith("liger_ops.") and name[0].isupper()


def on_config(config: MkDocsConfig) -> None:
    """Writes out the folders in nav."""
    index = ROOT / "docs" / "examples" / "index.md"
    linked = re.findall(r"\]\((\w+\.md)\)", index.read_text(encoding="utf-8")) if index.exists() else []
    pages = {
        "examples/": [f"examples/{page}" for page in ["index.md", *dict.fromkeys(linked)]],
        "api/": [{title: _api_page(folder)} for folder, title in API.items() if folder in exported_names()],
    }
    config.nav = _expanded(config.nav, pages)
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")  # anchors as the forge makes them


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
    if page.parent is None:  # nothing to list in a bar of the section
        page.meta["hide"] = ["navigation"]
    origins = {uri: path for path, uri in ROOT_PAGES.items() if uri != "index.md"}
    origin = origins.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def site_link(path: str) -> str:
        uri = ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}")
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")

    def link(match: re.Match[str]) -> str:
        image, text, address = match.groups()
        target, _, anchor = address.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if "://" in address or not target or not (ROOT / path).exists():
            return match[0]  # another host, this page, or an error that mkdocs reports
        if (ROOT / path).is_dir():
            return text
        if text.endswith(".md"):
            text = _title(ROOT / path)
        return f"{image}[{text}]({site_link(path)}{'#' if anchor else ''}{anchor})"

    def code(part: str) -> str:
        path = part.strip("`")
        return f"[{part}]({site_link(path)})" if _EXAMPLE.fullmatch(path) and (ROOT / path).exists() else part

    parts = _CODE.split(markdown)
    return "".join(code(part) if index % 2 else _LINK.sub(link, part) for index, part in enumerate(parts))


def _title(page: Path) -> str:
    """The first heading of a page, which says more to a reader of the site than the name of its file."""
    return next(
        (line[2:] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# ")), page.name
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts drawings into the page."""

    def inlined(match: re.Match[str]) -> str:
        drawing = (ROOT / "docs" / match[1]).read_text(encoding="utf-8")
        return f'<div class="drawn">{drawing}</div>'

    return _PLOT.sub(r'<div class="drawn">\g<0></div>', _DRAWING.sub(inlined, html))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> None:
    """Refuses what a browser would fetch from elsewhere.

    Raises:
        PluginError: For a script, style or picture of another host.
    """
    if (fetched := _FETCHED.search(output)) is not None:
        raise PluginError(f"{page.file.src_uri} fetches {fetched[0]}")
