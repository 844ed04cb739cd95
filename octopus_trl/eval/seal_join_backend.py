"""The seal join world as a corpus: static ranking, pages filled for one question at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from octopus_trl.agent.corpus import CORPUS_FILE, read_questions
from octopus_trl.agent.search import Bm25Backend
from octopus_trl.errors import ConfigError
from octopus_trl.eval.seal_join import SLOT, WORLD_FILE, World, WorldConfig
from octopus_trl.protocols import Page, SearchHit


class SealJoinBackend:
    """BM25 over the static pages; `bind` gives the view that one question's episodes read."""

    def __init__(self, base: Bm25Backend, world: World, row: Mapping[str, Any] | None = None):
        self.base, self.world, self._row = base, world, row

    def bind(self, example: Mapping[str, Any]) -> SealJoinBackend:
        """Return the backend whose opened pages carry this row's salts.

        Raises:
            ConfigError: the row lacks a column that the salts derive from.
        """
        if missing := [n for n in ("id", "salt_seed", "entities") if example.get(n) is None]:
            raise ConfigError(
                f"row {example.get('id')!r} lacks {missing}; seal join fills its pages from them; "
                "use rows that scripts/build_world.py writes, with all columns kept"
            )
        return SealJoinBackend(self.base, self.world, example)

    def fingerprint(self) -> str:
        """Hash of the static pages and the ranking."""
        return self.base.fingerprint()

    def search(self, query: str, k: int) -> list[SearchHit]:
        """Rank the unsalted pages; snippets show no slot."""
        return [
            SearchHit(hit.docid, hit.score, hit.title, SLOT.sub("", hit.snippet))
            for hit in self.base.search(query, k)
        ]

    def open(self, docid: str, page: int = 1) -> Page:
        """Return a page with its slots filled.

        Raises:
            ToolError: no such document or page.
            ConfigError: the backend was not bound to a row.
        """
        if self._row is None:
            raise ConfigError("seal join pages are filled per question; call bind(row) first")
        found = self.base.open(docid, page)
        text = self.world.fill(docid, found.text, self._row)
        return Page(docid, found.title, text, found.page, found.num_pages)


def load_world(folder: str | Path, **settings: Any) -> SealJoinBackend:
    """Open a folder that `World.write` wrote; `settings` go to `Bm25Backend.from_folder`.

    Raises:
        ConfigError: no or a broken `world.json`, or a corpus that this world did not write.
    """
    path = Path(folder) / WORLD_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: no readable world ({error}); a seal join folder holds {WORLD_FILE} and "
            f"{CORPUS_FILE}; run scripts/build_world.py"
        ) from None
    known = {field.name for field in fields(WorldConfig)}
    if not isinstance(record, dict) or set(record) - known:
        raise ConfigError(f"{path}: {record!r}; a world's keys are {sorted(known)}")
    world = World(WorldConfig(**record))
    base = Bm25Backend.from_folder(folder, **settings)
    if [*base.corpus] != world.documents():
        raise ConfigError(
            f"{base.corpus.path}: its pages are not those of {WORLD_FILE}; salts need both from "
            "one seed; run scripts/build_world.py again"
        )
    return SealJoinBackend(base, world)


def asked_row(folder: str | Path, question: str) -> dict[str, Any]:
    """Give the row of a world's question files that asks this, for `bind` to fill the pages from.

    Raises:
        ConfigError: none does; names a question that one asks.
    """
    known = ""
    for path in sorted(Path(folder).glob("questions*.jsonl")):
        for row in read_questions(path):
            known = known or row["question"]
            if row["question"].split() == question.split():
                return row
    raise ConfigError(
        f"{folder} is a small world, whose pages are filled in for its own questions: none of its "
        f"questions*.jsonl asks {question!r}; ask one of theirs"
        + (f", like {known!r}" if known else "")
    )


def is_world(folder: str | Path) -> bool:
    """Whether a corpus folder is a seal join world."""
    return (Path(folder) / WORLD_FILE).is_file()
