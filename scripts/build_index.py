"""Check a corpus folder and write its BM25 index beside it: `build_index.py FOLDER`."""

from __future__ import annotations

import argparse
import sys
import time

from octopus_trl.agent.corpus import Corpus
from octopus_trl.agent.search import Bm25Backend
from octopus_trl.errors import ConfigError


def main() -> int:
    """Index the corpus of a folder; a broken line ends in one message."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="folder that holds corpus.jsonl (format: data/README.md)")
    parser.add_argument("--k1", type=float, default=0.9, help="saturation of term counts")
    parser.add_argument("--b", type=float, default=0.4, help="weight of document length, 0 to 1")
    parser.add_argument("--try-query", metavar="TEXT", help="search for TEXT afterwards")
    options = parser.parse_args()
    try:
        start = time.perf_counter()
        backend = Bm25Backend(Corpus(options.folder), k1=options.k1, b=options.b)
        place = backend.save()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {options.folder}: the index cannot be written there ({error.strerror}); copy "
            "the corpus to a folder that can",
            file=sys.stderr,
        )
        return 2
    seconds = time.perf_counter() - start
    print(f"{len(backend.corpus)} documents indexed in {seconds:.1f} s: {place}")
    print(f"fingerprint {backend.fingerprint()}")
    if options.try_query:
        for hit in backend.search(options.try_query, 5):
            print(f"{hit.score:8.3f}  {hit.docid}  {hit.title}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
