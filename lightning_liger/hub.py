"""Repositories of the Hugging Face Hub: which paths name one, snapshots of them, and errors that name the argument.

Names, caches, tokens and offline mode are those of huggingface_hub, so of transformers too.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from liger_ops.arguments import check_path, check_text, wrong_value

TOKENIZER = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files of tokenizers and processors."""
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
_OF_THE_REPOSITORY = (
    HFValidationError,
    RepositoryNotFoundError,  # gated ones too
    RevisionNotFoundError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)


def is_repository(name: Any) -> bool:
    """Whether ``name`` is a possible ``owner/name`` of a repository."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return isinstance(name, str) and name.count("/") == 1


def is_hub_name(path: Any) -> bool:
    """Whether ``path`` is ``owner/name``, and neither a file nor a folder."""
    return is_repository(path) and not os.path.exists(path)


def check_for_repository(setting: str, value: Any, name: Any) -> None:
    """Raises unless ``value`` is None, or a text and ``name`` the owner/name of a repository."""
    check_text(setting, value, optional=True)
    if value is not None and not is_hub_name(name):
        raise wrong_value(setting, f"None, as {name!r} is not the owner/name of a repository", value)


def snapshot(
    setting: str,
    name: str,
    *patterns: str,
    revision: str | None = None,
    repo_type: Literal["model", "dataset"] = "model",
) -> Path:
    """The folder with a repository's files that match; those that the cache lacks are downloaded.

    The folder is named after the commit. Locks of the cache let one process of a node download, while others wait.

    Raises:
        ConnectionError: If the Hub cannot be reached and the files are not in the cache.
        FileNotFoundError: If there is no such repository or revision.
        PermissionError: If the repository is gated.
    """
    with naming_repository(setting, name, revision):
        return Path(snapshot_download(name, repo_type=repo_type, revision=revision, allow_patterns=[*patterns]))


def checkpoint_folder(setting: str, path: str | Path | None, revision: str | None = None) -> Path | None:
    """The folder of a checkpoint with its ``config.json``, which alone is downloaded from the Hub; None for None."""
    check_path(setting, path, optional=True)
    check_for_repository("revision" if setting in ("pretrained", "model") else f"{setting}_revision", revision, path)
    if path is None:
        return None
    files = "config.json", "adapter_config.json"
    folder = snapshot(setting, str(path), *files, revision=revision) if is_hub_name(path) else Path(path)
    if not (folder / "config.json").is_file():
        has_adapters = (folder / "adapter_config.json").is_file()
        hint = ", adapters of peft: merge them into their model first (merge_and_unload)" if has_adapters else ""
        raise FileNotFoundError(
            f"{setting} must be the folder of a Hugging Face checkpoint (config.json and weights), or owner/name of one"
            f" on the Hub such as 'openai-community/gpt2', got {str(path)!r}{hint}"
        )
    return folder


def download_weights(setting: str, path: str | Path, folder: Path) -> None:
    """Downloads the weights of a checkpoint on the Hub into ``folder``, which :func:`checkpoint_folder` returned."""
    for pattern in _WEIGHTS if is_hub_name(path) else ():
        snapshot(setting, str(path), "*.json", pattern, revision=folder.name)
        if any(folder.glob(pattern)):
            return


@contextmanager
def naming_repository(setting: str, name: str, revision: str | None = None) -> Iterator[None]:
    """Errors of the Hub, transformers' too, as errors that name the argument, its value and what to do."""
    given = f"{setting}={name!r}" + (f" with revision={revision!r}" if revision else "")
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    try:
        with _without_oserror():
            yield
    except HFValidationError as error:
        raise FileNotFoundError(f"{given} is neither an existing path nor owner/name of a repository") from error
    except GatedRepoError as error:
        access = "request access on its page of the Hub"
        raise PermissionError(f"{given} is gated: {access}, and {log_in} ({_first_line(error)})") from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(f"{given}: the repository has no such branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{given} is neither an existing path nor a repository of the Hub that you can access: check the name; for"
            f" a private repository {log_in}"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ConnectionError(
            f"{given} is not an existing path and not complete in the local cache, and the Hub cannot be reached (no"
            f" network, or HF_HUB_OFFLINE is set): {_first_line(error.__cause__ or error)}"
        ) from error
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise PermissionError(f"{given} is not permitted: {log_in} ({_first_line(error)})") from error
        raise ConnectionError(f"{given}: the Hub answers {_first_line(error)}") from error
    except HTTPError as error:
        raise ConnectionError(f"{given}: the Hub cannot be reached: {_first_line(error)}") from error


@contextmanager
def _without_oserror() -> Iterator[None]:
    """Raises an error about the repository itself, of which transformers makes an OSError."""
    cause = None
    try:
        yield
    except OSError as error:
        if type(error) is not OSError or not isinstance(error.__cause__, _OF_THE_REPOSITORY):
            raise
        cause = error.__cause__
    if cause is not None:
        raise cause


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
