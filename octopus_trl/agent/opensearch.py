"""BM25 on an OpenSearch (or Elasticsearch) server, for a corpus beyond one machine.

Terms are made here, by the analyzer of every other backend, and indexed as they are (a white-space
field): no analyzer of the server takes part. k1 and b are the similarity of the index, ties go by
docid, and idf counts all shards (`dfs_query_then_fetch`). Scores are Lucene's, with its one-byte
document lengths.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from octopus_trl.agent.analyzer import ANALYZER, analyze
from octopus_trl.agent.corpus import Corpus, Document
from octopus_trl.agent.http_json import HttpJson
from octopus_trl.agent.paging import (
    TextCutter,
    TokenEnds,
    check_weights,
    unknown_document,
    word_ends,
)
from octopus_trl.agent.postings import Progress, indexed_text
from octopus_trl.errors import ConfigError, ServiceError, ToolError
from octopus_trl.protocols import Page, SearchHit

MAX_TERMS = 1024
"""Most different terms of a query: Lucene's own limit of clauses."""
_BULK_BYTES = 8 << 20
_LONGEST_ID = 512
_FORMAT = 1


class OpenSearchBackend:
    """The `SearchBackend` of an index that `fill_index` wrote.

    Args:
        url: address of the server.
        index: name of the index.
        k1, b: what the index must have been written with.
        corpus_sha256: bytes that it must hold; None takes any.
        snippet_tokens, page_tokens, ends: see `TextCutter`.
        user, password: for a server that asks.
        timeout_s, retries: see `HttpJson`.
    Raises:
        ConfigError: no such server or index, one half written, or one of another k1, b, analyzer
            or corpus.
    """

    def __init__(
        self,
        url: str,
        index: str,
        *,
        k1: float = 0.9,
        b: float = 0.4,
        corpus_sha256: str | None = None,
        snippet_tokens: int = 64,
        page_tokens: int = 8192,
        ends: TokenEnds = word_ends,
        user: str | None = None,
        password: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 4,
    ) -> None:
        check_weights(k1, b)
        self._cutter = TextCutter(snippet_tokens=snippet_tokens, page_tokens=page_tokens, ends=ends)
        self._server = connect(
            url, user=user, password=password, timeout_s=timeout_s, retries=retries
        )
        self.index = index
        meta = _read_meta(self._server, index)
        if meta is None:
            raise ConfigError(
                f"{url}: no index {index!r}; write it with scripts/build_index.py FOLDER "
                f"--opensearch {url} --index {index}"
            )
        wanted = _identity(k1, b, corpus_sha256)
        for name, value in wanted.items():
            if value is not None and meta.get(name) != value:
                raise ConfigError(
                    f"{url}: {name} of index {index!r} is {meta.get(name)!r}, here it is "
                    f"{value!r}; an index serves only the corpus and settings it was written from; "
                    "write another one"
                )
        version = (self._server.call("GET", "/") or {}).get("version", {})
        scorer = f"{version.get('distribution', 'elasticsearch')} {version.get('number')}"
        self._identity = {**meta, "scorer": scorer}

    def fingerprint(self) -> str:
        """Hash of all that a result depends on, the server's version included."""
        record = json.dumps({**self._identity, **self._cutter.identity}, sort_keys=True)
        return hashlib.sha256(record.encode()).hexdigest()

    def search(self, query: str, k: int) -> list[SearchHit]:
        """Return at most `k` documents with a score above 0, best first, ties by docid.

        Raises:
            ToolError: the query has more than `MAX_TERMS` different terms.
            ServiceError: the server failed; this one call fails with it.
        """
        terms = analyze(query)
        if not terms or k < 1:
            return []
        if (count := len(set(terms))) > MAX_TERMS:
            raise ToolError(f"the query has {count} different words; at most {MAX_TERMS}")
        body = {
            "size": k,
            "query": {"match": {"terms": {"query": " ".join(terms), "operator": "or"}}},
            "sort": [{"_score": "desc"}, {"docid": "asc"}],
            "track_total_hits": False,
            "_source": ["docid", "title", "text"],
        }
        path = f"/{quote(self.index, safe='')}/_search?search_type=dfs_query_then_fetch"
        answer = self._server.call("POST", path, body)
        if answer.get("timed_out") or answer.get("_shards", {}).get("failed"):
            raise ServiceError(f"index {self.index}: some shards gave no answer")
        return [
            SearchHit(
                hit["_source"]["docid"],
                float(hit["_score"]),
                hit["_source"]["title"],
                self._cutter.snippet(hit["_source"]["text"]),
            )
            for hit in answer["hits"]["hits"]
        ]

    def open(self, docid: str, page: int = 1) -> Page:
        """Return page `page` (from 1) of a document.

        Raises:
            ToolError: no such document or page; the text is for the model.
            ServiceError: the server failed.
        """
        path = f"/{quote(self.index, safe='')}/_doc/{quote(docid, safe='')}"
        try:
            found = self._server.call("GET", path) if 0 < len(docid) <= _LONGEST_ID else {}
        except ServiceError as error:
            if error.status != 404:
                raise
            found = {}
        if not found.get("found"):
            raise unknown_document(docid)
        source = found["_source"]
        spans = self._cutter.spans(source["text"])
        return self._cutter.page(source["docid"], source["title"], source["text"], page, spans)


def connect(
    url: str,
    *,
    user: str | None = None,
    password: str | None = None,
    timeout_s: float = 60.0,
    retries: int = 4,
) -> HttpJson:
    """Give the connection to a server, with basic authentication where it asks for it."""
    headers = {}
    if user is not None:
        pair = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
        headers["Authorization"] = f"Basic {pair}"
    return HttpJson(url, headers=headers, timeout_s=timeout_s, retries=retries)


def fill_index(
    corpus: Corpus,
    server: HttpJson,
    index: str,
    *,
    k1: float = 0.9,
    b: float = 0.4,
    shards: int = 1,
    progress: Progress | None = None,
) -> None:
    """Write a corpus into an index of its own; one that is complete already is left alone.

    An index counts as complete only after its last document: what a killed run left is removed
    and written again.

    Raises:
        ConfigError: k1 or b out of range, an index of this name that holds something else, a docid
            that is too long, or a document that the server refuses.
        ServiceError: the server failed.
    """
    check_weights(k1, b)
    for docid in corpus.docids:
        if len(docid.encode()) > _LONGEST_ID:
            raise ConfigError(
                f"{corpus.path}: docid {docid[:40]!r}... has {len(docid.encode())} bytes; a server "
                f"takes at most {_LONGEST_ID}; shorten it"
            )
    place, meta = f"/{quote(index, safe='')}", _read_meta(server, index, half_written=True)
    wanted = {**_identity(k1, b, corpus.sha256), "num_documents": len(corpus)}
    if meta is not None:
        if {name: meta.get(name) for name in wanted} != wanted:
            raise ConfigError(
                f"{server.url}: index {index!r} holds something else ({meta}); give another name, "
                "or delete it there first"
            )
        if meta.get("complete"):
            return
        server.call("DELETE", place)
    server.call("PUT", place, _settings(wanted, k1, b, shards))
    done = 0
    for count, lines in _bulks(corpus):
        _send(server, place, lines)
        done += count
        if progress is not None:
            progress("send", done, len(corpus))
    server.call("POST", f"{place}/_refresh")
    server.call("PUT", f"{place}/_settings", {"index": {"refresh_interval": None}})
    server.call("PUT", f"{place}/_mapping", {"_meta": {**wanted, "complete": True}})


def _settings(meta: dict[str, Any], k1: float, b: float, shards: int) -> dict[str, Any]:
    hidden = {"type": "text", "index": False}
    return {
        "settings": {
            "index": {
                "number_of_shards": shards,
                "refresh_interval": "-1",
                "similarity": {"default": {"type": "BM25", "k1": float(k1), "b": float(b)}},
            }
        },
        "mappings": {
            "_meta": {**meta, "complete": False},
            "dynamic": "strict",
            "_source": {"excludes": ["terms"]},
            "properties": {
                "docid": {"type": "keyword"},
                "title": hidden,
                "text": hidden,
                "terms": {"type": "text", "analyzer": "whitespace"},
            },
        },
    }


def _bulks(corpus: Corpus) -> Iterator[tuple[int, bytes]]:
    """Give number and lines of each bulk request."""
    lines: list[bytes] = []
    size = 0
    for document in corpus:
        lines.append(_bulk_lines(document))
        size += len(lines[-1])
        if size >= _BULK_BYTES:
            yield len(lines), b"".join(lines)
            lines, size = [], 0
    if lines:
        yield len(lines), b"".join(lines)


def _bulk_lines(document: Document) -> bytes:
    source = {
        "docid": document.docid,
        "title": document.title,
        "text": document.text,
        "terms": " ".join(analyze(indexed_text(document))),
    }
    head = json.dumps({"index": {"_id": document.docid}})
    return f"{head}\n{json.dumps(source)}\n".encode()


def _send(server: HttpJson, place: str, lines: bytes) -> None:
    answer = server.call("POST", f"{place}/_bulk", lines)
    if not answer.get("errors"):
        return
    failed = [item["index"] for item in answer["items"] if item["index"].get("error")]
    first = failed[0]
    raise ConfigError(
        f"{server.url}{place}: {len(failed)} documents were refused, docid {first['_id']!r} first "
        f"(status {first.get('status')}, {first['error'].get('type')}); see the server's log, then "
        "run it again"
    )


def _read_meta(
    server: HttpJson, index: str, *, half_written: bool = False
) -> dict[str, Any] | None:
    """Give what an index says of itself, None where there is none."""
    try:
        answer = server.call("GET", f"/{quote(index, safe='')}/_mapping")
    except ServiceError as error:
        if error.status == 404:
            return None
        raise ConfigError(f"{error}; check the address, the rights and that the server runs") from (
            None
        )
    (mapping,) = answer.values()
    meta = dict(mapping.get("mappings", {}).get("_meta") or {})
    if not half_written and meta.pop("complete", None) is not True:
        raise ConfigError(
            f"{server.url}: index {index!r} is half written or not ours; write it again with "
            "scripts/build_index.py"
        )
    return meta


def _identity(k1: float, b: float, corpus_sha256: str | None) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "corpus_sha256": corpus_sha256,
        "analyzer": ANALYZER,
        "k1": float(k1),
        "b": float(b),
    }
