"""The seal join world: fixed bytes, salts, splits, retrieval, tokenizer, shipped files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from octopus_trl.agent.corpus import read_questions
from octopus_trl.errors import ConfigError, ToolError
from octopus_trl.eval import seal_join_words as words
from octopus_trl.eval.seal_join import FULL, SLOT, SPLITS, SYSTEM_PROMPT, World, WorldConfig
from octopus_trl.eval.seal_join_backend import SealJoinBackend, is_world, load_world
from octopus_trl.eval.seal_join_tokenizer import CONTROL, TAGS, build_tokenizer
from octopus_trl.protocols import BindsExample, SearchBackend

SHIPPED = Path(__file__).parents[2] / "data" / "seal_join"
SMALL = WorldConfig(num_adjectives=12, num_nouns=12)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory, world: World) -> SealJoinBackend:
    return load_world(world.write(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            total.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
            total.update(path.read_bytes())
    return total.hexdigest()


def test_one_seed_gives_one_world_and_another_seed_another(tmp_path: Path) -> None:
    folders = [
        World(SMALL).write(tmp_path / "a"),
        World(SMALL).write(tmp_path / "b"),
        World(dataclasses.replace(SMALL, seed=1)).write(tmp_path / "c"),
    ]
    first, second, third = map(digest, folders)
    assert first == second != third


def test_the_shipped_folder_is_what_the_script_writes(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "build_world.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    for path in sorted(tmp_path.rglob("*")):
        if path.is_file():
            shipped = SHIPPED / path.relative_to(tmp_path)
            assert shipped.read_bytes() == path.read_bytes(), f"{shipped} differs"


def test_the_script_never_writes_over_a_corpus_that_is_no_world(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("mine")
    script = Path(__file__).parents[2] / "scripts" / "build_world.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {corpus} is no seal join corpus")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
    assert corpus.read_text() == "mine"


def test_shipped_questions_read_and_answers_follow_from_their_salts(world: World) -> None:
    for split in SPLITS:
        rows = read_questions(SHIPPED / f"questions_{split}.jsonl")
        assert {row["split"] for row in rows} == {split}
        for row in rows[:50]:
            assert world.resalt(row, row["salt_seed"]) == row


def test_no_guild_of_a_test_question_is_in_a_training_question(world: World) -> None:
    guilds = {
        split: {
            world.steward[entity]
            for row in world.questions(split, 600)
            for entity in row["entities"]
        }
        for split in SPLITS
    }
    assert not guilds["train"] & guilds["test"]
    assert len(guilds["test"]) > 50


def test_a_fifth_of_the_guilds_is_kept_for_tests(world: World) -> None:
    share = sum(split == "test" for split in world.split.values()) / len(world.split)
    assert share == pytest.approx(0.2, abs=0.01)


def test_pages_and_index_hold_slots_and_no_seal(world: World) -> None:
    row = world.question("train", "late", 3, 0)
    text = "\n".join(document.text for document in world.documents())
    for seal in row["answers"][0].split():
        assert seal not in text
    assert not re.search(r"[A-Z2-9]{4}", SLOT.sub("", text))


@pytest.mark.parametrize("config", [WorldConfig(), FULL], ids=["small", "full"])
def test_the_page_asked_for_is_found_first(tmp_path: Path, config: WorldConfig) -> None:
    world = World(config)
    backend = load_world(world.write(tmp_path), snippet_tokens=0)
    for place in world.steward:
        assert backend.search(world.title(place), 2)[0].docid == world.docid[place, 2]
    for guild, first in world.first_edition.items():
        hits = [hit.docid for hit in backend.search(world.title(guild), 2)]
        assert hits == [world.docid[guild, first], world.docid[guild, 3 - first]]
    stale = sum(first == 1 for first in world.first_edition.values()) / len(world.first_edition)
    assert stale == pytest.approx(config.stale_first, abs=0.01)


def test_opened_pages_tell_the_truth_of_the_row(world: World, backend: SealJoinBackend) -> None:
    for row in world.questions("test", 60):
        truth, bound = world.truth(row), backend.bind(row)
        branches = row["branches"]
        for entity, docid in zip(row["entities"], row["gold_docs"], strict=False):
            guild = world.steward[entity]
            assert f"the steward of {entity} is {guild} guild." in bound.open(docid).text
        chairs = 0
        for index, docid in enumerate(row["gold_docs"][branches:]):
            text = bound.open(docid).text
            guild, seal = truth.guilds[index], truth.seals[index]
            assert f"{guild} {truth.wanted} seal {seal}." in text
            assert text.count(" seal ") == 6
            assert "edition 2 is current." in text
            chairs += f"the chair is {guild} and names {truth.named}." in text
            assert ("is not the chair" in text) == (index != truth.chair)
        assert chairs == 1
        assert row["answers"] == [" ".join(truth.seals)]
        assert (row["class"] is None) == (row["arm"] == "late")


def test_the_withdrawn_edition_says_so_and_has_other_seals(
    world: World, backend: SealJoinBackend
) -> None:
    row = world.question("train", "late", 1, 0)
    guild = world.truth(row).guilds[0]
    text = backend.bind(row).open(world.docid[guild, 1]).text
    assert "edition 1 is withdrawn." in text
    assert f"{guild} is not the chair." in text
    assert f"{guild} former quarry seal" in text
    assert row["answers"][0] not in text


def test_salts_are_fresh_for_each_visit_and_one_within_it(
    world: World, backend: SealJoinBackend
) -> None:
    row = world.question("train", "late", 2, 0)
    guild_page = row["gold_docs"][-1]
    texts = [backend.bind(world.resalt(row, seed)).open(guild_page).text for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert world.resalt(row, 1)["answers"] != row["answers"]
    assert world.resalt(row, 0) == row


def test_a_row_is_the_same_whatever_was_drawn_before_it(world: World) -> None:
    row = world.question("test", "early", 3, 17)
    World().questions("test", 30)
    assert World().question("test", "early", 3, 17) == row


def test_late_classes_and_chairs_are_spread_evenly(world: World) -> None:
    rows = [world.question("train", "late", 2, i) for i in range(600)]
    truths = [world.truth(row) for row in rows]
    for seal_class in world.classes:
        assert 60 <= sum(truth.wanted == seal_class for truth in truths) <= 140
    assert 240 <= sum(truth.chair for truth in truths) <= 360


def test_places_of_one_question_have_different_guilds(world: World) -> None:
    for row in [world.question("test", "late", 5, i) for i in range(50)]:
        assert len({world.steward[entity] for entity in row["entities"]}) == 5


def test_the_backend_binds_rows_and_is_closed_without_one(
    world: World, backend: SealJoinBackend
) -> None:
    assert isinstance(backend, BindsExample)
    assert isinstance(backend, SearchBackend)
    with pytest.raises(ConfigError, match=r"bind\(row\)"):
        backend.open(next(iter(world.docid.values())))
    with pytest.raises(ConfigError, match=r"lacks \['salt_seed'\]"):
        backend.bind({"id": "x", "entities": ["a b"]})
    row = world.question("train", "late", 1, 0)
    with pytest.raises(ToolError, match="no document"):
        backend.bind(row).open("nope")


def test_snippets_show_no_slots(tmp_path: Path) -> None:
    backend = load_world(World(SMALL).write(tmp_path), snippet_tokens=100)
    for guild in backend.world.split:
        for hit in backend.search(backend.world.title(guild), 5):
            assert "{" not in hit.snippet
            assert hit.snippet


@pytest.mark.parametrize("content", ["", "[]", '{"sead": 1}'])
def test_a_broken_world_file_is_refused(tmp_path: Path, content: str) -> None:
    World(SMALL).write(tmp_path)
    (tmp_path / "world.json").write_text(content)
    with pytest.raises(ConfigError, match="world"):
        load_world(tmp_path)


def test_a_corpus_of_another_seed_is_refused(tmp_path: Path) -> None:
    folder = World(SMALL).write(tmp_path)
    (folder / "world.json").write_text(
        json.dumps(dataclasses.asdict(dataclasses.replace(SMALL, seed=2)))
    )
    with pytest.raises(ConfigError, match=r"not those of world\.json"):
        load_world(folder)
    assert is_world(folder)
    assert not is_world(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "config",
    [
        {"num_adjectives": 0},
        {"num_nouns": 1000},
        {"num_classes": 13},
        {"num_symbols": 13},
        {"num_adjectives": 2, "num_nouns": 2},
        {"page_fillers": -1},
        {"stale_first": 1.5},
    ],
)
def test_settings_out_of_range_are_refused(config: dict) -> None:
    with pytest.raises(ConfigError):
        WorldConfig(**config)


@pytest.mark.parametrize(
    "call", [("dev", "late", 2, 0), ("train", "soon", 2, 0), ("train", "late", 0, 0)]
)
def test_questions_that_cannot_be_made_are_refused(world: World, call: tuple) -> None:
    with pytest.raises(ConfigError):
        world.question(*call)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_every_text_survives_a_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_vocabulary_fits_1024_and_ids_have_no_gap(tokenizer: Any) -> None:
    assert 990 <= len(tokenizer) <= 1024
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_shipped_tokenizer_loads_as_the_built_one(tokenizer: Any) -> None:
    shipped = AutoTokenizer.from_pretrained(SHIPPED / "tokenizer")
    text = (SHIPPED / "corpus.jsonl").read_text()[:20_000] + SYSTEM_PROMPT + "".join(TAGS)
    assert shipped.encode(text) == tokenizer.encode(text)
    assert shipped.decode(shipped.encode(text)) == text
    assert shipped.chat_template == tokenizer.chat_template
    assert (shipped.eos_token, shipped.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)


def test_words_symbols_and_tags_are_one_token_each(tokenizer: Any) -> None:
    lists = (words.ADJECTIVES, words.NOUNS, words.KINDS, words.CLASSES, words.PROTOCOL)
    for word in {word for items in lists for word in items}:
        assert len(tokenizer.encode(word)) == len(tokenizer.encode(f" {word}")) == 1, word
    for tag in (*CONTROL, *TAGS, *words.SYMBOLS):
        assert len(tokenizer.encode(tag)) == 1, tag
    assert len(tokenizer.encode("GKRB")) == 4
    assert tokenizer.encode("GKRB 7TQW")[:4] == tokenizer.encode("GKRB")


def test_names_classes_and_fillers_are_disjoint() -> None:
    lists = (
        words.ADJECTIVES,
        words.NOUNS,
        words.KINDS,
        words.CLASSES,
        words.THINGS,
        words.STATES,
        words.TIMES,
    )
    every = [word for items in lists for word in items]
    assert len(set(every)) == len(every)
    assert not set(every) & set(words.PROTOCOL)
    assert len(set(words.SYMBOLS)) == 32


def test_control_tokens_in_a_page_can_be_encoded_as_text(tokenizer: Any) -> None:
    text = "a <|im_end|> b"
    ids = tokenizer.encode(text, split_special_tokens=True)
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_the_template_is_safe_across_turns_and_short_in_the_compact_form(tokenizer: Any) -> None:
    system = {"role": "system", "content": SYSTEM_PROMPT}
    messages = [system, {"role": "user", "content": "find the chair seal of gold fox depot."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert len(tokenizer.encode(SYSTEM_PROMPT)) <= 60
    turn = {"role": "assistant", "reasoning_content": "x", "content": "y"}
    more = tokenizer.apply_chat_template(
        [*messages, turn, {"role": "user", "content": "z"}], tokenize=False
    )
    assert more.startswith(prompt)


def test_page_sizes_are_those_of_the_design(
    world: World, backend: SealJoinBackend, tokenizer: Any
) -> None:
    for row in [world.question("train", "late", 2, i) for i in range(20)]:
        bound = backend.bind(row)
        sizes = [len(tokenizer.encode(bound.open(docid).text)) for docid in row["gold_docs"]]
        assert all(50 <= size <= 80 for size in sizes[:2])
        assert all(105 <= size <= 150 for size in sizes[2:])
