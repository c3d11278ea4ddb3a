"""A server with the endpoints of the Hugging Face hub that a download asks, and a cache in the hub's layout."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT, OLD = "c" * 40, "0" * 40


def cache_of(cache: Path, repo: str, folder: Path, commit: str = COMMIT, names: tuple[str, ...] = ()) -> Path:
    """Put a folder, or these files of it, into a cache as a repository's branch main; return its snapshot."""
    own = cache / f"models--{repo.replace('/', '--')}"
    snapshot = own / "snapshots" / commit
    (own / "refs").mkdir(parents=True, exist_ok=True)
    (own / "refs" / "main").write_text(commit)
    for file in folder.rglob("*"):
        name = str(file.relative_to(folder))
        if file.is_file() and (not names or name in names):
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).symlink_to(file.resolve())
    return snapshot


class Hub(BaseHTTPRequestHandler):
    """Repositories by name and commit; `asked` collects the files whose content was read."""

    repositories: dict[str, dict[str, Path]] = {}
    asked: list[str] = []

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        parts = unquote(urlparse(self.path).path).strip("/").split("/")
        if parts[0] == "datasets":
            parts = parts[1:]
        if parts[:2] in (["api", "models"], ["api", "datasets"]):
            self._api("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)
        else:
            self._answer(404, {})

    def _api(self, repo: str, rest: list[str]) -> None:
        commits = self.repositories.get(repo)
        if commits is None:
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        revision = rest[1] if len(rest) > 1 else "main"
        commit = list(commits)[-1] if revision == "main" else revision
        if commit not in commits:
            return self._answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        if rest[:1] == ["tree"]:
            return self._answer(200, [self._entry(commits[commit], file) for file in _files(commits[commit])])
        return self._answer(200, {"id": repo, "sha": commit, "siblings": [], "private": False, "tags": []})

    def _file(self, repo: str, revision: str, name: str, body: bool) -> None:
        commit = list(self.repositories[repo])[-1] if revision == "main" else revision
        file = self.repositories[repo][commit] / name
        if not file.is_file():
            return self._answer(404, {}, {"X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        if body:
            self.asked.append(name)
        self.send_response(200)
        for key, value in {
            "X-Repo-Commit": commit,
            "ETag": f'"{_etag(content)}"',
            "Content-Length": len(content),
        }.items():
            self.send_header(key, str(value))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _entry(self, folder: Path, file: Path) -> dict[str, object]:
        content = file.read_bytes()
        name = str(file.relative_to(folder))
        return {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}

    def _answer(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": len(text), **(headers or {})}.items():
            self.send_header(key, str(value))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_arguments: object) -> None:
        pass


@contextmanager
def hub(repositories: dict[str, dict[str, Path]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a hub with these repositories, and the list of files that are downloaded from it."""
    asked: list[str] = []
    handler = type("OneHub", (Hub,), {"repositories": repositories, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
