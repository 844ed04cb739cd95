"""`scripts/build_index.py` from outside: killed, started again, shared by processes, its memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octopus_trl.agent.corpus import Corpus, read_questions
from octopus_trl.agent.search import Bm25Backend
from tests.agent.large_corpus import write_large_corpus

ROOT = Path(__file__).parents[2]
BUILD = [sys.executable, "scripts/build_index.py"]
# Reads an index that the parent has mapped too, and says how its memory lies.
READER = """
import json, sys
from octopus_trl.agent.search import Bm25Backend
backend = Bm25Backend.from_folder(sys.argv[1])
hits = backend.search(sys.argv[2], 5)
for name in ("data", "indices"):
    backend._index.scores[name].sum()
sizes, inside = {}, False
for line in open("/proc/self/smaps"):
    if "-" in line.split()[0]:
        inside = "data.csc.index.npy" in line or "indices.csc.index.npy" in line
    elif inside and line.split()[-1] == "kB":
        name = line.split(":")[0]
        sizes[name] = sizes.get(name, 0) + int(line.split()[1])
print(json.dumps({"sizes": sizes, "hits": [[hit.docid, hit.score] for hit in hits]}))
"""
MEASURED = """
import resource, sys
from octopus_trl.agent.corpus import Corpus
from octopus_trl.agent.search import write_index
write_index(Corpus(sys.argv[1]), max_postings=1 << 15)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [*BUILD, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def printed(code: str, *words: object) -> str:
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_a_killed_build_leaves_no_index_and_the_same_command_starts_again(tmp_path: Path) -> None:
    write_large_corpus(tmp_path, 400, words=2000, vocabulary=20_000)
    process = subprocess.Popen([*BUILD, str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL)
    index = tmp_path / "index"
    while not list(index.glob(".*.building")):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [path.name[0] for path in index.iterdir()] == ["."], "what is there is no index"
    done = run(tmp_path, "--try-query", "e")
    assert done.returncode == 0, done.stderr
    assert "400 documents indexed" in done.stdout
    (place,) = index.iterdir()
    assert Bm25Backend.load(place, Corpus(tmp_path)).fingerprint() in done.stdout


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc of Linux")
def test_a_second_process_shares_the_arrays_and_finds_the_same(tmp_path: Path) -> None:
    write_large_corpus(tmp_path, 150, words=2000, vocabulary=20_000)
    assert run(tmp_path).returncode == 0
    ours = Bm25Backend.from_folder(tmp_path)
    query = " ".join(ours.corpus[0].text.split()[:6])
    here = [[hit.docid, hit.score] for hit in ours.search(query, 5)]
    assert sum(float(ours._index.scores[name].sum()) for name in ("data", "indices")) > 0
    there = json.loads(printed(READER, tmp_path, query))
    sizes = there["sizes"]
    assert there["hits"] == here
    assert sizes["Rss"] > 500
    assert sizes["Private_Dirty"] == sizes["Shared_Dirty"] == 0
    assert sizes["Shared_Clean"] > 0.95 * sizes["Rss"], sizes


def test_questions_of_a_benchmark_are_written_beside_the_corpus_and_secret_ones_are_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"docid": "1", "text": "red kite"}\n')
    rows = [{"qid": n, "question": f"q{n}?", "answer": "a"} for n in range(7)]
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("--source", table, "--loader-options", "part=all", "min_passes=0")
    done = run(tmp_path, "--questions", "open-researcher", *asked)
    assert done.returncode == 0, done.stderr
    assert [row["id"] for row in read_questions(tmp_path)] == [str(n) for n in range(7)]
    wrong = run(tmp_path, "--questions", "open-researcher", "--source", tmp_path / "none.jsonl")
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


@pytest.mark.slow
def test_four_times_the_documents_take_no_more_memory(tmp_path: Path) -> None:
    peaks = []
    for name, documents in (("one", 300), ("four", 1200)):
        write_large_corpus(tmp_path / name, documents, vocabulary=50_000)
        peaks.append(int(printed(MEASURED, tmp_path / name)))
    assert peaks[1] < peaks[0] + 60, peaks
