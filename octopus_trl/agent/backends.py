"""Every search backend by one address, so that a run names its corpus in one setting.

| address | backend |
|---|---|
| `FOLDER` | BM25 in process over `FOLDER/corpus.jsonl`, its saved index mapped (`Bm25Backend`) |
| `lucene:FOLDER` | an Anserini index through pyserini (`LuceneBackend`) |
| `opensearch:URL/INDEX` | an index on a server (`OpenSearchBackend`) |
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from octopus_trl.agent.lucene import LuceneBackend
from octopus_trl.agent.opensearch import OpenSearchBackend
from octopus_trl.agent.search import Bm25Backend
from octopus_trl.errors import ConfigError
from octopus_trl.protocols import SearchBackend

LUCENE, OPENSEARCH = "lucene:", "opensearch:"
USER, PASSWORD = "OPENSEARCH_USER", "OPENSEARCH_PASSWORD"


def open_backend(address: str | Path, **settings: Any) -> SearchBackend:
    """Open the backend of an address.

    A server that asks for a name and a password gets those of the environment variables
    `OPENSEARCH_USER` and `OPENSEARCH_PASSWORD`.

    Args:
        settings: `k1`, `b`, `snippet_tokens`, `page_tokens`, `ends`, alike for all.
    Raises:
        ConfigError: no such address, or what the backend refuses.
    """
    address = str(address)
    if address.startswith(LUCENE):
        return LuceneBackend(address.removeprefix(LUCENE), **settings)
    if not address.startswith(OPENSEARCH):
        return Bm25Backend.from_folder(address, **settings)
    url, _, index = address.removeprefix(OPENSEARCH).rpartition("/")
    if "://" not in url or not index:
        raise ConfigError(f"{address!r}: an index on a server is opensearch:http://HOST:PORT/INDEX")
    user, password = os.environ.get(USER), os.environ.get(PASSWORD)
    return OpenSearchBackend(url, index, user=user, password=password, **settings)
