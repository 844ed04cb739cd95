"""Benchmarks from files of the published schemas, made here; what is wrong is one clear error."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from octopus_trl.agent.corpus import Corpus
from octopus_trl.errors import ConfigError
from octopus_trl.eval.benchmarks.benchmark import Benchmark, check_docids
from octopus_trl.eval.benchmarks.browsecomp_plus import (
    CANARY_VARIABLE,
    decode,
    encode,
    load_browsecomp_plus,
    read_qrels,
    write_corpus,
)
from octopus_trl.eval.benchmarks.choice import load_benchmark
from octopus_trl.eval.benchmarks.open_researcher import (
    VALIDATION_RULE,
    load_open_researcher,
    validation_ids,
)
from octopus_trl.eval.benchmarks.overlap import find_overlap
from octopus_trl.eval.benchmarks.tables import read_rows

CANARY = "made-up canary 0123"
SECRET = "SECRET question about a ünïque thing"
ROWS = [
    {
        "query_id": str(number),
        "query": encode(f"{SECRET} {number}", CANARY),
        "answer": encode(f"SECRET {number}", CANARY),
        "gold_docs": [{"docid": encode("7", CANARY), "text": encode("gold", CANARY)}],
    }
    for number in range(5)
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refused(call: Callable[[], object], match: str) -> None:
    """The call gives one ConfigError, and neither it nor what led to it shows a decoded text."""
    with pytest.raises(ConfigError, match=match) as error:
        call()
    assert "SECRET" not in "".join(traceback.format_exception(error.value, chain=True))


# --- BrowseComp-Plus


@pytest.mark.parametrize("text", ["", "a", "ünï🙂", "x" * 31, "x" * 32, "x" * 33, "x" * 1000])
def test_decoding_undoes_encoding(text: str) -> None:
    assert decode(encode(text, CANARY), CANARY) == text


def test_the_published_code_is_met() -> None:
    # SHA-256 of "abc" starts ba 78 16 bf; the four bytes of "test" are 74 65 73 74.
    assert encode("test", "abc") == "zh1lyw=="


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.parquet", "hub/data/test-00000-of-00001.parquet"]
)
def test_questions_are_decoded_from_files_and_downloads(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, ROWS)
    source = tmp_path / "hub" if name.startswith("hub") else path
    found = load_benchmark("browsecomp-plus", source, canary=CANARY, expected=5)
    assert [row["id"] for row in found.questions] == ["0", "1", "2", "3", "4"]
    assert found.questions[3] == {
        "id": "3",
        "question": f"{SECRET} 3",
        "answers": ["SECRET 3"],
    }
    assert found.secret
    assert "SECRET" not in repr(found) + str(found) + found.fingerprint()


def test_only_the_asked_columns_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.parquet", ROWS)
    asked: list[Any] = []
    plain = parquet.ParquetFile.iter_batches

    def watched(self: Any, *args: Any, columns: Any = None, **options: Any) -> Any:
        asked.append(columns)
        return plain(self, *args, columns=columns, **options)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", watched)
    load_browsecomp_plus(path, canary=CANARY, expected=5)
    assert asked == [["query_id", "query", "answer"]]


def test_the_canary_comes_from_the_operators_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.delenv(CANARY_VARIABLE, raising=False)
    refused(lambda: load_browsecomp_plus(path, expected=5), f"no canary.*set {CANARY_VARIABLE}")
    monkeypatch.setenv(CANARY_VARIABLE, CANARY)
    assert len(load_browsecomp_plus(path, expected=5)) == 5


@pytest.mark.parametrize("canary", ["another canary", CANARY + " ", "x"])
def test_a_wrong_canary_is_refused_and_gives_no_rows_of_garbage(
    tmp_path: Path, canary: str
) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    refused(
        lambda: load_browsecomp_plus(path, canary=canary, expected=5),
        r"not one of 5 questions decodes: the canary is a wrong one",
    )


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("query", "%%%%", r"query of query_id '2' is no base64"),
        ("query", SECRET, r"query of query_id '2' is no base64"),
        ("answer", "abc", r"answer of query_id '2' is no base64"),
        ("query", encode(SECRET, "other"), r"1 of 5 questions do not decode, query_id '2' first"),
        ("answer", "", r"1 of 5 questions do not decode, query_id '2' first"),
        ("query_id", "1", r"id '1' is in rows 1 and 2; ids are unique"),
        ("query_id", " ", r"row 2 has id ' '"),
    ],
)
def test_damaged_rows_are_named_by_their_id(
    tmp_path: Path, column: str, value: str, message: str
) -> None:
    rows = [dict(row) for row in ROWS]
    rows[2][column] = value
    path = write(tmp_path / "rows.jsonl", rows)
    refused(lambda: load_browsecomp_plus(path, canary=CANARY, expected=5), message)


def test_a_part_of_the_set_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    refused(lambda: load_browsecomp_plus(path, canary=CANARY), "5 rows, the published set has 830")
    assert len(load_browsecomp_plus(path, canary=CANARY, expected=None)) == 5


def test_relevant_documents_join_their_questions(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    lines = [f"{n} Q0 d{n} 1\n{n} Q0 e{n} 2\n{n} Q0 x{n} 0\n\n" for n in range(5)]
    qrels = tmp_path / "qrel_golds.txt"
    qrels.write_text("".join(lines))
    found = load_browsecomp_plus(path, canary=CANARY, gold=qrels, evidence=qrels, expected=5)
    assert found.questions[4]["gold_docs"] == found.questions[4]["evidence_docs"] == ["d4", "e4"]
    check_docids("x", ["d4"], ["d4", "e4"])
    refused(lambda: check_docids("x", ["d4", "d5"], ["d4"]), "1 gold documents are not in .* 'd5'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0 Q0 d 1\n0 Q0 d\n", r"qrels:2: 3 columns"),
        ("0 Q0 d yes\n", r"qrels:1: 4 columns; a line is `qid Q0 docid relevance`"),
        ("9 Q0 d 1\n", r"1 of its questions are not among the 5 loaded, qid '9' first"),
        ("0 Q0 d 1\n1 Q0 d 0\n", r"no relevant document for 4 questions, id '1' first"),
    ],
)
def test_broken_relevance_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "qrels").write_text(content)
    refused(
        lambda: load_browsecomp_plus(path, canary=CANARY, gold=tmp_path / "qrels", expected=5),
        message,
    )


def test_a_missing_relevance_file_is_named(tmp_path: Path) -> None:
    refused(lambda: read_qrels(tmp_path / "none"), "no readable file of relevant documents")


def test_a_corpus_table_becomes_a_corpus_folder(tmp_path: Path) -> None:
    rows = [{"docid": n, "text": f"---\ntitle: T{n}\n---\nx", "url": None} for n in range(300)]
    source = write(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", rows)
    seen: list[int] = []
    write_corpus(
        tmp_path, source.parents[1], expected=300, progress=lambda _, done, __: seen.append(done)
    )
    corpus = Corpus(tmp_path)
    assert (len(corpus), corpus.titles[7], seen) == (300, "T7", [256])
    check_docids("x", ["299"], corpus.docids)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"docid": "1", "text": "x"}, {"docid": 1, "text": "y"}], "docid '1' is there twice"),
        ([{"docid": "1"}], "no column text; its columns are docid"),
        ([{"docid": "1", "text": "x"}], "1 rows, the published set has 2"),
    ],
)
def test_a_broken_corpus_table_leaves_no_corpus(
    tmp_path: Path, rows: list[dict], message: str
) -> None:
    source = write(tmp_path / "corpus_rows.jsonl", rows)
    folder = tmp_path / "out"
    refused(lambda: write_corpus(folder, source, expected=2), message)
    assert list(folder.iterdir()) == []


# --- reading tables


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.parquet", "hub/test.jsonl", "hub/test.parquet"]
)
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [{"query_id": "1", "query": "x"}])
    source = path.parent if name.startswith("hub") else path
    refused(
        lambda: load_browsecomp_plus(source, canary=CANARY),
        "no column answer; its columns are query_id, query",
    )


def test_a_hub_name_without_a_network_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(
        lambda: load_browsecomp_plus(canary=CANARY),
        r"cannot be loaded .*hf download --repo-type dataset Tevatron/browsecomp-plus --local-dir",
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"query_id": "SECRET', r"rows\.jsonl:1: broken JSON"),
        ("rows.jsonl", b'{"query_id": "\xff"}', r"rows\.jsonl:1: byte 14 is not UTF-8"),
        ("rows.parquet", b"PAR1 SECRET", r"no readable parquet file"),
        ("rows.csv", b"a,b", r"a table is a \.jsonl or \.parquet file"),
        ("hub/test.jsonl", b'{"query_id": "SECRET', r"cannot be loaded"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    source = path.parent if name.startswith("hub") else path
    refused(lambda: list(read_rows(source, ("query_id",), split="test")), message)


# --- OpenResearcher


def researcher(tmp_path: Path, count: int = 40) -> Path:
    rows = [
        {"qid": n, "question": f"question {n}", "answer": f"answer {n}", "messages": []}
        for n in range(count)
    ]
    random.Random().shuffle(rows)
    return write(tmp_path / "questions.jsonl", rows)


def test_the_parts_are_disjoint_and_follow_from_the_ids_alone(tmp_path: Path) -> None:
    one, two = (
        [
            [row["id"] for row in load_open_researcher(path, part=part, num_validation=9).questions]
            for part in ("train", "validation", "all")
        ]
        for path in (researcher(tmp_path / "a"), researcher(tmp_path / "b"))
    )
    for first, second in zip(one, two, strict=True):
        assert set(first) == set(second)
    train, validation, whole = one
    assert len(validation) == 9
    assert set(train) | set(validation) == set(whole)
    assert not set(train) & set(validation)


def test_the_rule_of_the_validation_ids_does_not_move() -> None:
    qids = [str(n) for n in range(6102)]
    drawn = validation_ids(qids)
    assert len(drawn) == len(set(drawn)) == 500
    assert drawn[:4] == validation_ids(reversed(qids))[:4]
    assert "sha256('octopus_trl open-researcher validation 1:' + qid)" in VALIDATION_RULE
    assert set(validation_ids(qids[:3000], 100)) >= set(drawn[:100]) & set(qids[:3000])


def test_only_questions_of_middling_difficulty_are_trained_on(tmp_path: Path) -> None:
    questions = researcher(tmp_path, 20)
    passes = {n: n if n <= 16 else 3 for n in range(19)}  # 19 has no label
    labels = [
        {"qid": n, "correct": attempt < right, "trace": "x"}
        for n, right in passes.items()
        for attempt in range(16)
    ]
    path = write(tmp_path / "labels.parquet", labels)
    train = load_open_researcher(questions, labels=path, num_validation=0)
    assert {int(row["id"]) for row in train.questions} == {*range(1, 15), 17, 18}
    assert "1 questions are harder, 2 easier, 1 without a label" in train.notes[-1]
    held_out = load_open_researcher(questions, labels=path, part="validation", num_validation=20)
    assert len(held_out) == 20, "what is held out is not filtered"


@pytest.mark.parametrize(
    ("settings", "labels", "message"),
    [
        ({"part": "dev"}, [], "part='dev'"),
        ({"min_passes": 5, "max_passes": 4}, [], "min_passes=5"),
        ({"max_passes": 17}, [], "max_passes=17"),
        ({}, [{"qid": 1, "correct": 2}], "correct of qid '1' is 2"),
        ({"attempts": 14}, [{"qid": 1, "correct": 1}] * 15, "qid '1' has 15 attempts, at most 14"),
        ({}, [{"qid": 999, "correct": 1}], "0 questions are left; .*40 without a label"),
    ],
)
def test_wrong_labels_and_settings_are_named(
    tmp_path: Path, settings: dict, labels: list, message: str
) -> None:
    path = write(tmp_path / "labels.jsonl", labels) if labels else None
    with pytest.raises(ConfigError, match=message):
        load_open_researcher(researcher(tmp_path), labels=path, **{"num_validation": 0, **settings})


def test_a_repeated_qid_is_refused_before_ids_are_drawn(tmp_path: Path) -> None:
    rows = [{"qid": 1, "question": "q", "answer": "a"}] * 2
    with pytest.raises(ConfigError, match="id '1' is in rows 0 and 1"):
        load_open_researcher(write(tmp_path / "q.jsonl", rows), part="validation")


def test_what_training_shares_with_the_test_set_is_found() -> None:
    long = (
        "which of the two brothers who founded the mill by the river later became mayor there "
        "and when was that"
    )
    held_out: list[dict[str, Any]] = [
        {"id": "t1", "question": long, "gold_urls": ["https://www.example.org/Page/#top"]},
        {"id": "t2", "question": "Who was it?"},
    ]
    rows: list[dict[str, Any]] = [
        {"id": "same", "question": "  who WAS it "},
        {"id": "shared", "question": "Tell me " + long.replace("later", "then later")},
        {"id": "part", "question": "Tell me, " + " ".join(long.split()[2:]) + " and why?"},
        {"id": "address", "question": "free", "gold_urls": ["http://example.org/page"]},
        {
            "id": "free",
            "question": "which of the two brothers did not",
            "gold_urls": ["http://e.org"],
        },
    ]
    found = find_overlap(rows, held_out)
    assert found.same == ("same",)
    assert set(found.shared) == {"same", "part"}
    assert found.documents == ("address",)
    assert found.ids == {"same", "part", "address"}


# --- question answering, folders, seal join


def test_flashrags_rows_and_those_of_verl_give_the_same_questions(tmp_path: Path) -> None:
    flash: list[dict[str, Any]] = [
        {"id": "test_0", "question": "who?", "golden_answers": ["A", "B"], "metadata": {}},
        {"id": "test_1", "question": "when?", "golden_answers": ["1907"]},
    ]
    verl: list[dict[str, Any]] = [
        {
            "data_source": "nq",
            "prompt": [{"role": "user", "content": f"Answer it. Question: x Question: {q}\n"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": gold}},
            "extra_info": {"split": "test", "index": index},
        }
        for index, (q, gold) in enumerate([("who?", ["A", "B"]), ("when?", ["1907"])])
    ]
    one = load_benchmark("qa", write(tmp_path / "flash.jsonl", flash))
    two = load_benchmark("qa", write(tmp_path / "verl.parquet", verl))
    for first, second in zip(one.questions, two.questions, strict=True):
        assert (first["question"], first["answers"]) == (second["question"], second["answers"])
    assert [row["id"] for row in one.questions] == ["test_0", "test_1"]
    assert [row["id"] for row in two.questions] == ["nq-test-0", "nq-test-1"]
    assert len(load_benchmark("qa", tmp_path / "flash.jsonl", limit=1)) == 1
    config = write(tmp_path / "hub" / "hotpotqa" / "test.jsonl", flash).parents[1]
    (config / "README.md").write_text(
        "---\nconfigs:\n- config_name: hotpotqa\n  data_files:\n  - split: test\n"
        "    path: hotpotqa/test.jsonl\n---\n"
    )
    third = load_benchmark("qa", config, config="hotpotqa")
    assert third.fingerprint() == one.fingerprint()
    refused(lambda: load_benchmark("qa", config, config="none"), "cannot be loaded")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "1", "golden_answers": ["a"]}, "row 0: no question"),
        ({"id": "1", "question": "q"}, "row 0: no gold answer"),
        ({"id": "1", "question": "q", "golden_answers": []}, "answers of id '1' is missing"),
    ],
)
def test_rows_without_question_or_answer_are_named(tmp_path: Path, row: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_benchmark("qa", write(tmp_path / "rows.jsonl", [row]))


def test_a_users_folder_and_the_small_world_are_benchmarks(tmp_path: Path) -> None:
    write(tmp_path / "questions.jsonl", [{"id": 1, "question": "q", "answer": "a", "level": 3}])
    folder = load_benchmark("folder", tmp_path)
    assert folder.questions == ({"id": "1", "question": "q", "answers": ["a"], "level": 3},)
    world = load_benchmark("seal-join", num_questions=4, branches=(1, 3))
    assert [row["branches"] for row in world.questions] == [1, 3, 1, 3]
    again = load_benchmark("seal-join", num_questions=4, branches=(1, 3), salt_seed=7)
    assert again.fingerprint() != world.fingerprint()
    with pytest.raises(ConfigError, match="split='dev'"):
        load_benchmark("seal-join", split="dev")


def test_an_unknown_benchmark_is_named() -> None:
    with pytest.raises(ConfigError, match="must be one of browsecomp-plus, open-researcher"):
        load_benchmark("nope")
    with pytest.raises(ConfigError, match="x: 0 questions are left"):
        Benchmark("x", ())
    with pytest.raises(ValueError):
        decode("?", CANARY)
