"""A local server that plays the interface of the Hugging Face Hub, for the real client: repositories in memory."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """Repositories, ``"models/owner/name"`` or ``"datasets/owner/name"``, by revision, and the requests that came."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.private: dict[str, bool] = {}
        self.token = "hf_right"
        self.requests: list[str] = []
        self.endpoint = ""

    def add(self, name: str, files: Path | dict[str, bytes], revision: str = "main") -> None:
        if isinstance(files, Path):
            files = {str(file.relative_to(files)): file.read_bytes() for file in files.rglob("*") if file.is_file()}
        self.repositories.setdefault(name, {})[revision] = files

    def downloads(self, suffix: str = "") -> list[str]:
        """The files of which the content was sent."""
        return [each.split()[1] for each in self.requests if each.startswith("GET") and "/resolve/" in each and
                each.endswith(suffix)]  # fmt: skip

    @contextlib.contextmanager
    def running(self) -> "Iterator[Hub]":
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _serve(self, body: bytes) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(f"{self.command} {path}")
        if path == "api/repos/create":
            return self._create(json.loads(body))
        if path == "api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if found := re.fullmatch(r"api/(models|datasets)/([^/]+/[^/]+)(?:/([a-z-]+)/([^/]+).*)?", path):
            kind, name, action, revision = found.groups()
            return self._api(f"{kind}/{name}", action or "revision", revision or "main", body)
        if found := re.fullmatch(r"(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind, name, revision, file = found.groups()
            return self._file(f"{kind or 'models/'}{name}", revision, file)
        return self._error(404, "EntryNotFound")

    def _files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and its files; None after an error was sent."""
        if name not in self.hub.repositories:
            self._error(401, "RepoNotFound")
            return None
        for key, files in self.hub.repositories[name].items():
            if revision in (key, commit_of(files)):
                return commit_of(files), files
        self._error(404, "RevisionNotFound")
        return None

    def _api(self, name: str, action: str, revision: str, body: bytes) -> None:
        if (found := self._files(name, revision)) is None:
            return None
        commit, files = found
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
        ]
        if action == "revision":
            identity = {"id": name.partition("/")[2], "sha": commit, "private": self.hub.private.get(name, False)}
            siblings = [{"rfilename": path} for path in files]
            return self._json({**identity, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0})
        if action == "tree":
            return self._json(entries)
        if action == "paths-info":
            return self._json([entry for entry in entries if entry["path"] in json.loads(body)["paths"]])
        if action == "preupload":
            wanted = json.loads(body)["files"]
            files_json = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in wanted]
            return self._json({"files": files_json})
        for line in map(json.loads, body.splitlines()):  # commit
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"{self.hub.endpoint}/{name.partition('/')[2]}/commit/{commit_of(files)}"
        return self._json({"commitUrl": url, "commitOid": commit_of(files), "success": True})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'user'}/{asked['name']}"
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._error(403, "")
        exists = f"models/{name}" in self.hub.repositories
        if not exists:
            self.hub.add(f"models/{name}", {})
            self.hub.private[f"models/{name}"] = asked.get("visibility") == "private" or bool(asked.get("private"))
        return self._json({"url": f"{self.hub.endpoint}/{name}", "name": name}, 409 if exists else 200)

    def _file(self, name: str, revision: str, file: str) -> None:
        if (found := self._files(name, revision)) is None:
            return
        commit, files = found
        if file not in files:
            return self._error(404, "EntryNotFound")
        if name in self.hub.gated and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._error(403, "GatedRepo")
        etag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
        self._send(200, files[file], {"ETag": etag, "X-Repo-Commit": commit})

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), "Accept-Ranges": "bytes", **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
