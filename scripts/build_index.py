"""Check a corpus folder and write its BM25 index beside it.

    python scripts/build_index.py FOLDER --try-query "some words"
    python scripts/build_index.py data/openresearcher --questions open-researcher \
        --download OpenResearcher/OpenResearcher-Corpus

The index is written beside its place and renamed: a build that was stopped leaves none, and the
same command starts again. A corpus that is there is not downloaded again.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from rich.progress import TaskProgressColumn

from octopus_trl.agent.corpus import CORPUS_FILE, Corpus, write_questions
from octopus_trl.agent.opensearch import OpenSearchBackend, connect, fill_index
from octopus_trl.agent.search import Bm25Backend, write_index
from octopus_trl.errors import ConfigError
from octopus_trl.eval.benchmarks.benchmark import Benchmark, check_docids
from octopus_trl.eval.benchmarks.browsecomp_plus import CORPUS, NUM_DOCUMENTS, write_corpus
from octopus_trl.eval.benchmarks.choice import BENCHMARKS, load_benchmark, read_options
from octopus_trl.protocols import SearchBackend
from octopus_trl.report.ending import ending
from octopus_trl.report.progress import StageBars


def main() -> None:
    """Index the corpus of a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="folder that holds corpus.jsonl (format: data/README.md)")
    parser.add_argument("--k1", type=float, default=0.9, help="saturation of term counts")
    parser.add_argument("--b", type=float, default=0.4, help="weight of document length, 0 to 1")
    parser.add_argument(
        "--download",
        metavar="TABLE",
        nargs="?",
        const=CORPUS,
        help=f"write corpus.jsonl from a table with docid and text ({CORPUS}), unless it is there",
    )
    parser.add_argument(
        "--questions", choices=list(BENCHMARKS), help="write this benchmark's questions.jsonl too"
    )
    parser.add_argument("--source", help="of the benchmark: files or hub name")
    parser.add_argument(
        "--loader-options", nargs="*", default=[], metavar="KEY=VALUE", help="of the benchmark"
    )
    parser.add_argument("--opensearch", metavar="URL", help="write to this server instead")
    parser.add_argument("--index", default="octopus", help="name of the index on that server")
    parser.add_argument("--user", help="of that server; the password is in OPENSEARCH_PASSWORD")
    parser.add_argument("--try-query", metavar="TEXT", help="search for TEXT afterwards")
    options = parser.parse_args()
    try:
        start = time.perf_counter()
        with StageBars(TaskProgressColumn()) as bars:
            asked = questions_of(options) if options.questions else None
            if (Path(options.folder) / CORPUS_FILE).is_file():
                options.download = None
            if options.download:
                expected = NUM_DOCUMENTS if options.download == CORPUS else None
                write_corpus(
                    options.folder, options.download, expected=expected, progress=bars.tell
                )
            corpus = Corpus(options.folder, progress=bars.tell)
            if asked is not None:
                save_questions(options.folder, asked, corpus)
            place, backend = _write(options, corpus, bars)
    except OSError as error:
        raise ConfigError(
            f"{options.folder}: the index cannot be written there ({error.strerror}); copy the "
            "corpus to a folder that can"
        ) from error
    seconds = time.perf_counter() - start
    print(f"{len(corpus)} documents indexed in {seconds:.1f} s: {place}")
    print(f"fingerprint {backend.fingerprint()}")
    if options.try_query:
        for hit in backend.search(options.try_query, 5):
            print(f"{hit.score:8.3f}  {hit.docid}  {hit.title}")


def questions_of(options: argparse.Namespace) -> Benchmark:
    """Load the benchmark whose questions are asked over the corpus.

    Raises:
        ConfigError: it cannot be loaded, or must not be written in clear.
    """
    name = options.questions
    chosen = load_benchmark(name, options.source, **read_options(options.loader_options))
    if chosen.secret:
        raise ConfigError(
            f"--questions {name}: its questions must not be written in clear; scripts/evaluate.py "
            f"--benchmark {name} holds them in memory alone"
        )
    return chosen


def save_questions(folder: str, chosen: Benchmark, corpus: Corpus) -> None:
    """Write the questions of a benchmark beside the corpus that they are asked over.

    Raises:
        ConfigError: the corpus lacks a document that holds an answer.
    """
    gold = [docid for row in chosen.questions for docid in row.get("gold_docs") or ()]
    check_docids(chosen.name, gold, corpus.docids)
    path = write_questions(folder, chosen.questions)
    print(f"{len(chosen)} questions of {chosen.name} in {path}")
    for note in chosen.notes:
        print(f"  {note}")


def _write(
    options: argparse.Namespace, corpus: Corpus, bars: StageBars
) -> tuple[str, SearchBackend]:
    """Write the index that was asked for; give its place and the backend that reads it."""
    k1, b = options.k1, options.b
    if not options.opensearch:
        folder = write_index(corpus, k1=k1, b=b, progress=bars.tell)
        return str(folder), Bm25Backend.load(folder, corpus, k1=k1, b=b)
    password = os.environ.get("OPENSEARCH_PASSWORD")
    server = connect(options.opensearch, user=options.user, password=password)
    fill_index(corpus, server, options.index, k1=k1, b=b, progress=bars.tell)
    backend = OpenSearchBackend(
        options.opensearch, options.index, k1=k1, b=b, user=options.user, password=password
    )
    return f"{options.index} on {options.opensearch}", backend


if __name__ == "__main__":
    with ending(stopped="no index was written, run it again"):
        main()
