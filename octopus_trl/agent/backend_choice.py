"""Which search backend a run reads: the embedded index of a folder, a server, or Lucene's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from octopus_trl.agent.lucene import LuceneBackend
from octopus_trl.agent.opensearch import OpenSearchBackend
from octopus_trl.agent.search import Bm25Backend
from octopus_trl.errors import ConfigError
from octopus_trl.protocols import SearchBackend

BACKENDS = ("bm25", "opensearch", "pyserini")
PASSWORD = "OPENSEARCH_PASSWORD"


def open_backend(
    kind: str | None,
    folder: str | Path,
    *,
    url: str | None = None,
    index: str | None = None,
    user: str | None = None,
    **settings: Any,
) -> SearchBackend:
    """Open the corpus behind `search` and `open`.

    Args:
        kind: one of `BACKENDS`; None takes opensearch where an address is given, else bm25.
        folder: holds `corpus.jsonl` for bm25; the others do not read it.
        url: address of an OpenSearch server; its password is in `OPENSEARCH_PASSWORD`.
        index: name of the server's index, or folder of a Lucene index.
        user: of the server.
        settings: k1, b, snippet_tokens, page_tokens, ends; see the backends.
    Raises:
        ConfigError: another kind, one that lacks its address or index or has one too many, or
            what the backend refuses.
    """
    kind = kind or ("opensearch" if url else "bm25")
    if kind not in BACKENDS:
        raise ConfigError(f"backend={kind!r}: must be one of {', '.join(BACKENDS)}")
    if url is not None and kind != "opensearch":
        raise ConfigError(f"search_url={url} with backend={kind}: only opensearch has an address")
    if kind == "bm25":
        if index is not None:
            raise ConfigError(
                f"index={index} with backend=bm25: its index lies in the folder of its corpus; "
                "drop it, or name another backend"
            )
        return Bm25Backend.from_folder(folder, **settings)
    if index is None:
        what = "the name of its index" if kind == "opensearch" else "the folder of a Lucene index"
        raise ConfigError(f"backend={kind} without index: give {what}")
    if kind == "pyserini":
        return LuceneBackend(index, **settings)
    if url is None:
        raise ConfigError("backend=opensearch without search_url: give http://HOST:PORT")
    password = os.environ.get(PASSWORD)
    return OpenSearchBackend(url, index, user=user, password=password, **settings)
