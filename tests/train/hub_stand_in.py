"""As much of the hub's HTTP API as a push uses, on a local port, with failures to order."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

from huggingface_hub import constants


class Hub:
    """What was asked of the hub, and what it holds.

    Attributes:
        fail: how many of the next requests to create a repository are refused.
        commits: message and files by name of each commit.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.fail = 0
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        self.commits: list[tuple[str, dict[str, bytes]]] = []

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Give status and body of the answer to a POST."""
        self.requests.append(path)
        if path == "/api/repos/create":
            if self.fail > 0:
                self.fail -= 1
                return 500, {"error": "the hub is down"}
            name = json.loads(body)["name"]
            return 200, {"url": f"{self.endpoint}/someone/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            return 200, {
                "files": [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in files
                ]
            }
        if path.endswith("/commit/main"):
            lines = [json.loads(line) for line in body.splitlines() if line]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            self.commits.append((lines[0]["value"]["summary"], files))
            return 200, {
                "success": True,
                "commitOid": f"{len(self.commits):040}",
                "commitUrl": f"{self.endpoint}/someone/run/commit/{len(self.commits):040}",
            }
        return 404, {"error": f"no such place: {path}"}


@contextmanager
def hub_stand_in() -> Iterator[Hub]:
    """Serve a hub and point the client of this process at it."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(self._chunks())
            else:
                body = self.rfile.read(length)
            hub.tokens.add(self.headers.get("Authorization"))
            status, answer = hub.answer(self.path.partition("?")[0], body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with (
            mock.patch.object(constants, "ENDPOINT", hub.endpoint),
            mock.patch.object(constants, "HF_HUB_OFFLINE", False),
        ):
            yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
