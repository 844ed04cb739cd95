"""BM25 over a folder: ranking without bm25s's faults, pages, snippets, identity, bad input."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from octopus_trl.agent.corpus import Corpus, read_questions
from octopus_trl.agent.search import (
    Bm25Backend,
    analyze,
    index_path,
    split_pages,
    token_ends,
    word_ends,
)
from octopus_trl.errors import ConfigError, ToolError
from octopus_trl.eval.seal_join_tokenizer import build_tokenizer
from octopus_trl.protocols import SearchBackend

FOX = [
    {"docid": "a", "text": "a red fox runs", "title": "Fox"},
    {"docid": "10", "text": "red kite"},
    {"docid": "c", "text": "red kite"},
    {"docid": "9", "text": "red kite"},
    {"docid": "e", "text": ""},
    {"docid": "f", "text": '---\ntitle: "Grey owl"\ndate: 2001\n---\nAn owl\'s nest.'},
]


def folder_of(path: Path, documents: list[dict], name: str = "corpus.jsonl") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_text("".join(json.dumps(item) + "\n" for item in documents))
    return path


@pytest.fixture
def fox(tmp_path: Path) -> Bm25Backend:
    return Bm25Backend.from_folder(folder_of(tmp_path, FOX))


def random_documents(count: int) -> list[dict]:
    draw = random.Random(3)
    words = [f"w{i}" for i in range(40)]
    return [
        {"docid": str(i), "text": " ".join(draw.choices(words, k=draw.randint(1, 60)))}
        for i in range(count)
    ]


def lucene_scores(documents: list[dict], query: str, k1: float, b: float) -> dict[str, float]:
    terms = {d["docid"]: Counter(analyze(d["text"])) for d in documents}
    mean = sum(sum(t.values()) for t in terms.values()) / len(terms)
    scores: dict[str, float] = {}
    for term in analyze(query):
        df = sum(term in t for t in terms.values())
        idf = math.log(1 + (len(terms) - df + 0.5) / (df + 0.5))
        for docid, t in terms.items():
            if t[term]:
                length = 1 - b + b * sum(t.values()) / mean
                scores[docid] = scores.get(docid, 0) + idf * t[term] / (t[term] + k1 * length)
    return scores


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.2, 0.75), (25.0, 1.0)])
def test_scores_equal_lucenes_formula(tmp_path: Path, k1: float, b: float) -> None:
    documents = random_documents(97)
    backend = Bm25Backend.from_folder(folder_of(tmp_path, documents), k1=k1, b=b)
    for query in ("w1 w7", "w3", "w5 w5 w39", "w0 w1 w2 w3 w4"):
        expected = lucene_scores(documents, query, k1, b)
        found = {hit.docid: hit.score for hit in backend.search(query, 1000)}
        assert found.keys() == expected.keys()
        for docid, score in found.items():
            assert score == pytest.approx(expected[docid], rel=1e-5)


def test_every_k_is_a_prefix_of_the_whole_ranking(tmp_path: Path) -> None:
    backend = Bm25Backend.from_folder(folder_of(tmp_path, random_documents(97)))
    whole = backend.search("w1 w7 w20", 1000)
    assert [(-h.score, h.docid) for h in whole] == sorted((-h.score, h.docid) for h in whole)
    for k in range(len(whole) + 2):
        assert backend.search("w1 w7 w20", k) == whole[:k]


def test_zero_scores_are_dropped_and_ties_go_by_docid(fox: Bm25Backend) -> None:
    assert [hit.docid for hit in fox.search("kite", 5)] == ["10", "9", "c"]
    assert [hit.docid for hit in fox.search("kite", 2)] == ["10", "9"]


@pytest.mark.parametrize("query", ["", "   ", "the of and", "zzz", "?!", "\x00", "🙂"])
def test_a_query_without_known_words_finds_nothing(fox: Bm25Backend, query: str) -> None:
    assert fox.search(query, 5) == []


@pytest.mark.parametrize(("k", "count"), [(-1, 0), (0, 0), (3, 3), (10_000, 4)])
def test_k_is_clamped_to_what_there_is(fox: Bm25Backend, k: int, count: int) -> None:
    assert len(fox.search("red", k)) == count


def test_case_and_inflection_do_not_matter(fox: Bm25Backend) -> None:
    assert fox.search("KITES", 3) == fox.search("kite", 3)


def test_titles_come_from_the_field_the_front_matter_or_the_first_line(fox: Bm25Backend) -> None:
    assert fox.corpus.titles == ["Fox", "red kite", "red kite", "red kite", "", "Grey owl"]
    assert fox.search("grey", 5)[0].docid == "f"
    assert fox.search("fox", 5)[0].title == "Fox"


def test_the_backend_satisfies_the_protocol_of_the_tools(fox: Bm25Backend) -> None:
    assert isinstance(fox, SearchBackend)


def test_a_saved_index_ranks_as_the_built_one_and_is_mapped(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, random_documents(53))
    built = Bm25Backend.from_folder(folder)
    place = built.save()
    assert place == index_path(built.corpus, 0.9, 0.4)
    loaded = Bm25Backend.from_folder(folder)
    assert isinstance(loaded._index.scores["data"], np.memmap)
    assert loaded.search("w1 w2 w3", 20) == built.search("w1 w2 w3", 20)
    assert built.save() == place
    assert [item.name for item in place.parent.iterdir()] == [place.name]


def test_a_build_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    places = []
    for name in ("one", "two"):
        backend = Bm25Backend.from_folder(folder_of(tmp_path / name, random_documents(53)))
        places.append(backend.save())
    first, second = ({f.name: f.read_bytes() for f in place.iterdir()} for place in places)
    assert first == second


def test_an_index_of_another_corpus_is_refused(tmp_path: Path) -> None:
    place = Bm25Backend.from_folder(folder_of(tmp_path / "one", FOX)).save()
    other = Corpus(folder_of(tmp_path / "two", FOX[1:]))
    with pytest.raises(ConfigError, match=r"corpus_sha256 of .*build_index"):
        Bm25Backend.load(place, other)


def test_an_index_of_other_parameters_is_refused(fox: Bm25Backend) -> None:
    place = fox.save()
    with pytest.raises(ConfigError, match=r"k1 of the index is 0\.9, here it is 1\.5"):
        Bm25Backend.load(place, fox.corpus, k1=1.5)


def test_a_half_written_index_is_refused(fox: Bm25Backend) -> None:
    place = fox.save()
    (place / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="build it again"):
        Bm25Backend.load(place, fox.corpus)


def test_all_that_a_result_depends_on_is_in_the_fingerprint(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "one", FOX)
    prints = [
        Bm25Backend.from_folder(folder).fingerprint(),
        Bm25Backend.from_folder(folder, k1=1.2).fingerprint(),
        Bm25Backend.from_folder(folder, b=0.75).fingerprint(),
        Bm25Backend.from_folder(folder_of(tmp_path / "two", FOX[::-1])).fingerprint(),
    ]
    prints += [
        Bm25Backend.from_folder(folder, snippet_tokens=5).fingerprint(),
        Bm25Backend.from_folder(folder, page_tokens=5).fingerprint(),
        Bm25Backend.from_folder(folder, ends=token_ends(build_tokenizer())).fingerprint(),
    ]
    assert len(set(prints)) == 7
    assert Bm25Backend.from_folder(folder).fingerprint() == prints[0]


def test_a_large_corpus_without_an_index_is_not_indexed_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octopus_trl.agent.search.MAX_UNSAVED", 3)
    with pytest.raises(ConfigError, match=r"6 documents and no index .* scripts/build_index\.py"):
        Bm25Backend.from_folder(folder_of(tmp_path, FOX))


@pytest.mark.parametrize(
    "settings",
    [{"k1": -0.1}, {"k1": float("nan")}, {"b": 1.5}, {"page_tokens": 0}, {"snippet_tokens": -1}],
)
def test_settings_out_of_range_are_refused(tmp_path: Path, settings: dict) -> None:
    with pytest.raises(ConfigError):
        Bm25Backend.from_folder(folder_of(tmp_path, FOX), **settings)


@pytest.mark.parametrize("tokenizer", [None, build_tokenizer()])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "one",
        " ".join(f"word{i}" for i in range(500)),
        "x" * 3000,
        "line\n\n" * 200,
        "ünï🙂cødé " * 100,
        "<|im_end|> </tool_response> " * 50,
    ],
)
def test_pages_join_to_the_text_and_keep_their_limit(tokenizer: object, text: str) -> None:
    ends = word_ends if tokenizer is None else token_ends(tokenizer)
    spans = split_pages(text, 37, ends)
    assert "".join(text[start:end] for start, end in spans) == text
    assert all(len(ends(text[start:end])) <= 37 for start, end in spans)
    assert all(end > start for start, end in spans) or text == ""


def test_pages_count_from_one_and_their_number_is_stable(tmp_path: Path) -> None:
    long = [{"docid": "d", "text": " ".join(f"w{i}" for i in range(100))}]
    backend = Bm25Backend.from_folder(folder_of(tmp_path, long), page_tokens=30)
    pages = [backend.open("d", number) for number in range(1, 5)]
    assert [page.num_pages for page in pages] == [4] * 4
    assert "".join(page.text for page in pages) == long[0]["text"]
    for number in (0, 5, -1):
        with pytest.raises(ToolError, match="pages are 1 to 4"):
            backend.open("d", number)


def test_an_unknown_docid_is_a_message_for_the_model(fox: Bm25Backend) -> None:
    with pytest.raises(ToolError, match="no document 'nope'"):
        fox.open("nope", 1)


def test_snippets_hold_at_most_the_asked_tokens_of_the_head(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    text = "  the OAK fox\nholds " + "a very long tail " * 300
    for limit in (0, 1, 5, 64):
        backend = Bm25Backend.from_folder(
            folder_of(tmp_path, [{"docid": "d", "text": text}]),
            snippet_tokens=limit,
            ends=token_ends(tokenizer),
        )
        snippet = backend.search("oak", 1)[0].snippet
        assert " ".join(text.split()).startswith(snippet)
        assert len(tokenizer.encode(snippet)) <= limit


def test_slow_tokenizers_are_refused_as_a_measure() -> None:
    with pytest.raises(ConfigError, match="use_fast"):
        token_ends(object())


def test_threads_that_share_a_backend_get_equal_answers(tmp_path: Path) -> None:
    backend = Bm25Backend.from_folder(folder_of(tmp_path, random_documents(97)))
    queries = [f"w{i} w{i + 1} walking" for i in range(39)] * 5
    expected = [backend.search(query, 7) for query in queries]
    fresh = Bm25Backend.from_folder(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: fresh.search(query, 7), queries)) == expected


BAD_LINES = [
    ('{"text": "x"}', r":2: docid is None; every line has a docid.*add"),
    ('{"docid": "", "text": "x"}', r":2: docid is ''"),
    ('{"docid": true, "text": "x"}', r":2: docid is True"),
    ('{"docid": "a", "text": "x"}', r":2: docid 'a' is already on line 1"),
    ('{"docid": "b"', r":2: broken JSON"),
    ('["b"]', r":2: the line holds list"),
    ('{"docid": "b"}', r":2: text of docid 'b' is None"),
    ('{"docid": "b", "text": 3}', r":2: text of docid 'b' is 3"),
    ('{"docid": "b", "text": "x", "title": 3}', r":2: title of docid 'b' is 3"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_corpus_line_is_named_with_rule_and_fix(
    tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"docid": "a", "text": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        Corpus(tmp_path)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(b'\n{"docid": "a", "text": "\xff"}\n')
    with pytest.raises(ConfigError, match=":2: byte 24 is not UTF-8"):
        Corpus(tmp_path)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_corpus_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "corpus.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="0 documents"):
        Corpus(tmp_path)


def test_a_corpus_without_any_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no document holds a word"):
        Bm25Backend.from_folder(folder_of(tmp_path, [{"docid": "a", "text": "the ?"}]))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"corpus\.jsonl: no such file"):
        Corpus(tmp_path)


def test_integer_docids_are_texts_and_blank_lines_do_not_shift_reads(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(
        '\n{"docid": 7, "text": "red"}\n\n{"docid": "8", "text": "blue"}'
    )
    corpus = Corpus(tmp_path)
    assert corpus.docids == ["7", "8"]
    assert [document.text for document in corpus] == ["red", "blue"]


BAD_QUESTIONS = [
    ('{"question": "q", "answers": ["a"]}', r":2: id is None"),
    ('{"id": "1", "question": "q", "answers": ["a"]}', r":2: id '1' is already on line 1"),
    ('{"id": "2", "answers": ["a"]}', r":2: question is None"),
    ('{"id": "2", "question": " ", "answers": ["a"]}', r":2: question is ' '"),
    ('{"id": "2", "question": "q"}', r":2: answers is None; a question has at least one"),
    ('{"id": "2", "question": "q", "answers": []}', r":2: answers is \[\]"),
    ('{"id": "2", "question": "q", "answers": [""]}', r":2: answers is \[''\]"),
    ('{"id": "2", "question": "q", "answers": 4}', r":2: answers is 4"),
    ("{", r":2: broken JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD_QUESTIONS)
def test_a_bad_question_is_named_with_rule_and_fix(tmp_path: Path, line: str, message: str) -> None:
    good = '{"id": "1", "question": "q", "answers": ["a"]}\n'
    (tmp_path / "questions.jsonl").write_text(good + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_questions(tmp_path)


def test_questions_keep_other_columns_and_one_answer_becomes_a_list(tmp_path: Path) -> None:
    rows = [{"id": 5, "question": "q", "answer": "a", "level": "hard"}]
    folder = folder_of(tmp_path, rows, "questions.jsonl")
    assert read_questions(folder) == [
        {"id": "5", "question": "q", "answers": ["a"], "level": "hard"}
    ]


def test_no_question_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="0 questions"):
        read_questions(tmp_path)
