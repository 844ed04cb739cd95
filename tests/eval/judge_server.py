"""A stand-in for an OpenAI-compatible server that runs a judge."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from octopus_trl.eval.judge_models import ServerModel

YES, NO = "reasoning: same\ncorrect: yes", "reasoning: other\ncorrect: no"


class JudgeServer(ThreadingHTTPServer):
    """Answers `/v1/chat/completions` with what `reply(body)` gives: a status, and JSON."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply: Callable[[dict[str, Any]], tuple[int, Any]] = lambda body: (200, said(YES))
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def model(self, **settings: Any) -> ServerModel:
        return ServerModel(f"{self.url}/", "pinned", **{"retries": 1, "backoff_s": 0.0, **settings})


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            status, answer = self.server.reply(body)
        if self.path != "/v1/chat/completions":
            status = 404
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


def said(content: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}
