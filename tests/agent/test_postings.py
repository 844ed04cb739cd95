"""The streamed build: bm25s's own arrays, whatever the size of its runs; nothing half written."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from octopus_trl.agent import postings
from octopus_trl.agent._bm25s import bm25s
from octopus_trl.agent.analyzer import analyze
from octopus_trl.agent.corpus import Corpus
from octopus_trl.agent.postings import indexed_text
from octopus_trl.agent.search import Bm25Backend, index_path, write_index
from octopus_trl.errors import ConfigError

ARRAYS = ("data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy")


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    draw = random.Random()
    words = [f"word{i}ing" for i in range(300)] + ["the", "Ünï", "walks", "walked"]
    lines = [
        {"docid": str(i), "text": " ".join(draw.choices(words, k=draw.randint(0, 90)))}
        for i in range(131)
    ]
    lines[7]["text"] = ""
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Corpus(tmp_path)


def by_bm25s(corpus: Corpus, k1: float, b: float) -> bm25s.BM25:
    """Give the index that bm25s builds from whole lists of terms."""
    vocabulary: dict[str, int] = {}
    rows = [
        [vocabulary.setdefault(term, len(vocabulary)) for term in analyze(indexed_text(document))]
        for document in corpus
    ]
    index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
    index.index((rows, vocabulary), create_empty_token=False, show_progress=False)
    return index


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (25.0, 1.0)])
@pytest.mark.parametrize("max_postings", [1, 65, 1000, 10**6])
def test_arrays_equal_those_of_bm25s_for_every_size_of_run(
    corpus: Corpus, k1: float, b: float, max_postings: int
) -> None:
    place = write_index(corpus, k1=k1, b=b, max_postings=max_postings)
    ours, theirs = bm25s.BM25.load(place, show_progress=False), by_bm25s(corpus, k1, b)
    assert ours.vocab_dict == theirs.vocab_dict
    for name in ("data", "indices", "indptr"):
        assert np.array_equal(ours.scores[name], theirs.scores[name]), name
    assert ours.scores["data"].dtype == np.float32


def test_the_bytes_of_an_index_do_not_depend_on_its_runs(corpus: Corpus, tmp_path: Path) -> None:
    one, two = (
        write_index(corpus, path=tmp_path / name, max_postings=size)
        for name, size in (("one", 17), ("two", 10**6))
    )
    assert {f.name: f.read_bytes() for f in one.iterdir()} == {
        f.name: f.read_bytes() for f in two.iterdir()
    }


def test_forgetting_word_forms_changes_nothing(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = write_index(corpus, path=tmp_path / "kept")
    monkeypatch.setattr(postings, "MAX_WORD_FORMS", 3)
    forgot = write_index(corpus, path=tmp_path / "forgot")
    assert [(kept / n).read_bytes() for n in ARRAYS] == [(forgot / n).read_bytes() for n in ARRAYS]


def test_progress_reaches_the_end_of_every_stage(corpus: Corpus, tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}

    def tell(stage: str, done: int, total: int) -> None:
        seen.setdefault(stage, []).append((done, total))

    write_index(Corpus(tmp_path, progress=tell), progress=tell, max_postings=100)
    assert list(seen) == ["check", "read", "merge"]
    for stage in seen.values():
        assert stage == sorted(stage)
        assert stage[-1][0] == stage[-1][1] > 0
    assert len(seen["merge"]) > 5


def test_a_full_disk_leaves_the_old_index_and_nothing_else(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_index(corpus)
    before = {f.name: f.read_bytes() for f in place.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(postings._Column, "append", full)
    with pytest.raises(OSError, match="No space left"):
        write_index(corpus)
    assert [item.name for item in place.parent.iterdir()] == [place.name]
    assert {f.name: f.read_bytes() for f in place.iterdir()} == before


def test_what_a_killed_build_left_is_not_taken_for_an_index(corpus: Corpus) -> None:
    place = index_path(corpus, 0.9, 0.4)
    left = place.with_name(f".{place.name}.building")
    left.mkdir(parents=True)
    (left / "run_000000.npy").write_bytes(b"half")
    assert write_index(corpus) == place
    assert [item.name for item in place.parent.iterdir()] == [place.name]
    built = Bm25Backend(corpus)
    query = analyze(corpus[0].text + corpus[1].text)[0]
    assert Bm25Backend.load(place, corpus).search(query, 9) == built.search(query, 9)


def test_two_builds_of_one_index_do_not_meet(corpus: Corpus) -> None:
    def second(stage: str, done: int, total: int) -> None:
        with pytest.raises(ConfigError, match="another process is building"):
            write_index(corpus)
        met.append(stage)

    met: list[str] = []
    write_index(corpus, progress=second)
    assert met
