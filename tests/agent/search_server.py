"""A stand-in for the part of OpenSearch's HTTP API that our backend calls, with exact BM25."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class SearchServer(ThreadingHTTPServer):
    """Indexes in memory. The next `failures` requests are answered with status 503."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.indexes: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.failures = 0
        self.refuse_docid: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, method: str, path: list[str], data: bytes) -> tuple[int, Any]:
        if not path:
            return 200, {"version": {"distribution": "opensearch", "number": "3.0.0"}}
        name, rest = path[0], path[1:]
        if method == "PUT" and not rest:
            self.indexes[name] = {**json.loads(data), "documents": {}}
            return 200, {"acknowledged": True}
        index = self.indexes.get(name)
        if index is None:
            return 404, {"error": {"type": "index_not_found_exception"}}
        if method == "DELETE":
            del self.indexes[name]
            return 200, {}
        if rest[0] == "_mapping":
            if method == "PUT":
                index["mappings"].update(json.loads(data))
            return 200, {name: {"mappings": index["mappings"]}}
        if rest[0] == "_bulk":
            return 200, self._bulk(index, data)
        if rest[0] == "_doc":
            found = index["documents"].get(rest[1])
            return (200, {"found": True, "_source": found}) if found else (404, {"found": False})
        if rest[0] == "_search":
            return 200, self._search(index, json.loads(data))
        return 200, {}

    def _bulk(self, index: dict[str, Any], data: bytes) -> dict[str, Any]:
        lines = [json.loads(line) for line in data.splitlines()]
        items: list[dict[str, Any]] = []
        for head, source in zip(lines[::2], lines[1::2], strict=True):
            docid = head["index"]["_id"]
            item: dict[str, Any] = {"_id": docid, "status": 201}
            if docid == self.refuse_docid:
                item |= {"status": 400, "error": {"type": "mapper_parsing_exception"}}
            else:
                index["documents"][docid] = source
            items.append({"index": item})
        return {"errors": any("error" in item["index"] for item in items), "items": items}

    def _search(self, index: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        setting = index["settings"]["index"]["similarity"]["default"]
        k1, b = setting["k1"], setting["b"]
        terms = {d: Counter(s["terms"].split()) for d, s in index["documents"].items()}
        mean = sum(t.total() for t in terms.values()) / len(terms)
        scores: Counter[str] = Counter()
        for term in body["query"]["match"]["terms"]["query"].split():
            df = sum(term in t for t in terms.values())
            idf = math.log(1 + (len(terms) - df + 0.5) / (df + 0.5))
            for docid, t in terms.items():
                if t[term]:
                    norm = k1 * (1 - b + b * t.total() / mean)
                    scores[docid] += idf * t[term] / (t[term] + norm)
        ranked = sorted(scores, key=lambda d: (-scores[d], d))[: body["size"]]
        return {
            "timed_out": False,
            "_shards": {"failed": 0},
            "hits": {
                "hits": [
                    {
                        "_score": scores[docid],
                        "_source": {n: index["documents"][docid][n] for n in body["_source"]},
                    }
                    for docid in ranked
                ]
            },
        }


class _Handler(BaseHTTPRequestHandler):
    server: SearchServer

    def _handle(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = [unquote(part) for part in urlsplit(self.path).path.split("/") if part]
        self.server.requests.append((self.command, self.path))
        self.server.headers.append(dict(self.headers))
        if self.server.failures > 0:
            self.server.failures -= 1
            status, answer = 503, {"error": {"type": "busy"}}
        else:
            status, answer = self.server.answer(self.command, path, data)
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_DELETE = _handle

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    """Serve on a thread until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
