"""The corpus of an evaluation from a command line: flags, and what `search` and `open` read."""

from __future__ import annotations

import argparse
from typing import Any

from octopus_trl.agent.backend_choice import BACKENDS, open_backend
from octopus_trl.agent.search import token_ends
from octopus_trl.errors import ConfigError
from octopus_trl.eval.seal_join_backend import load_world


def add_corpus_flags(parser: argparse.ArgumentParser) -> None:
    """Let a command line name what searches the corpus, and how."""
    add = parser.add_argument
    add("--backend", choices=BACKENDS, help="bm25 of --data's corpus.jsonl, or one of the others")
    add("--search-url", help="address of an OpenSearch server; password in OPENSEARCH_PASSWORD")
    add("--index", help="index on that server, or folder of a Lucene index (pyserini)")
    add("--search-user", help="of that server")
    add("--k1", type=float, default=0.9)
    add("--b", type=float, default=0.4)
    add("--snippet-tokens", type=int, default=512)


def open_corpus(asked: argparse.Namespace, *, world: bool, page_tokens: int, tokenizer: Any) -> Any:
    """Open what `search` and `open` read.

    Args:
        asked: holds the flags of `add_corpus_flags` and `data`, a folder or None.
        world: the folder holds a small world.
        page_tokens: most tokens of a page, counted by `tokenizer`.
    Raises:
        ConfigError: a world with a backend of its own, or what the backend refuses.
    """
    if world:
        if asked.backend or asked.search_url or asked.index:
            raise ConfigError(
                f"--data {asked.data} is a small world, whose pages are filled in a question at a "
                "time: drop --backend, --search-url and --index, or give another folder"
            )
        return load_world(asked.data, snippet_tokens=0)
    return open_backend(
        asked.backend,
        asked.data or "",
        url=asked.search_url,
        index=asked.index,
        user=asked.search_user,
        k1=asked.k1,
        b=asked.b,
        snippet_tokens=asked.snippet_tokens,
        ends=token_ends(tokenizer),
        page_tokens=page_tokens,
    )
