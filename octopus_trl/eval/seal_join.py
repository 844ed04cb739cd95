"""Seal join: a small world whose answers no single thread can know.

Depots and stations are stewarded by guilds. A guild's page lists one seal for each class. A
question names B places and asks for one class's seal of all their guilds, in order. In the
`early` arm the question names the class. In the `late` arm exactly one of the B guilds holds the
chair and its page names the class: no branch can tell which of its seals matters, and the answer
needs text from every branch.

Seals, the chair and its class are salted: they derive from the question's id and `salt_seed` and
are filled in when a page is opened, so an index of the pages is static, a group of rollouts reads
one truth, and nothing can be learned by heart. Everything else derives from the world's seed, to
the byte.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octopus_trl.agent.corpus import CORPUS_FILE, Document
from octopus_trl.errors import ConfigError
from octopus_trl.eval import seal_join_words as words

WORLD_FILE = "world.json"
ARMS = ("early", "late")
SPLITS = ("train", "test")
# The agent appends the tools' signatures (`compact_tools`).
SYSTEM_PROMPT = (
    "find seals. fork a thread for each place, wait for all, read each thread, then commit the "
    "seals in order. a thread: search its place, open the page, search the steward guild, open "
    "the current edition, commit done."
)
SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """What a world is made of; two equal configs make equal bytes.

    Args:
        seed: start of every draw.
        num_adjectives, num_nouns: words that names combine; their product is the number of names.
        num_classes: seals on a guild's page.
        num_symbols: symbols of a seal, each one of 32 and one token.
        named_seals: a seal's sentence names its guild, so that its words alone find it.
        page_fillers, guild_fillers: sentences without facts on a page.
        stale_first: share of guilds whose withdrawn edition ranks above the current one.
        test_share: share of guilds, with all that they steward, kept for test questions.
    Raises:
        ConfigError: a number is out of range.
    """

    seed: int = 0
    num_adjectives: int = 48
    num_nouns: int = 48
    num_classes: int = 6
    num_symbols: int = 4
    named_seals: bool = True
    page_fillers: int = 4
    guild_fillers: int = 3
    stale_first: float = 0.15
    test_share: float = 0.2

    def __post_init__(self) -> None:
        for name, most in (
            ("num_adjectives", len(words.ADJECTIVES)),
            ("num_nouns", len(words.NOUNS)),
            ("num_classes", len(words.CLASSES)),
            ("num_symbols", 12),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must lie in 1..{most}")
        if self.num_adjectives * self.num_nouns < 80:
            raise ConfigError(
                f"num_adjectives x num_nouns is {self.num_adjectives * self.num_nouns}; a world "
                "needs at least 80 names so that both splits have guilds; raise either"
            )
        for name in ("page_fillers", "guild_fillers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be at least 0")
        for name in ("stale_first", "test_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must lie in [0, 1]")


# Pages of about 250 and 360 tokens that say "its quarry seal is ...": 12 classes of 6 symbols.
FULL = WorldConfig(
    num_adjectives=62,
    num_nouns=61,
    num_classes=12,
    num_symbols=6,
    named_seals=False,
    page_fillers=28,
    guild_fillers=26,
)


@dataclass(frozen=True, slots=True)
class Truth:
    """What a perfect reader of one question's pages knows.

    Attributes:
        guilds: steward of each place, in the question's order.
        chair: index of the guild that holds the chair.
        named: class that the chair's page names.
        wanted: class asked for: the question's own, or the named one.
        seals: the wanted seal of each guild.
    """

    guilds: tuple[str, ...]
    chair: int
    named: str
    wanted: str
    seals: tuple[str, ...]


class World:
    """Names, pages and questions of one `WorldConfig`."""

    def __init__(self, config: WorldConfig | None = None) -> None:
        self.config = config = config or WorldConfig()
        self.classes = words.CLASSES[: config.num_classes]
        draw = self._draw("names")
        names = [
            f"{adjective} {noun}"
            for adjective, noun in itertools.product(
                words.ADJECTIVES[: config.num_adjectives], words.NOUNS[: config.num_nouns]
            )
        ]
        draw.shuffle(names)
        self.kind = {name: words.KINDS[i % len(words.KINDS)] for i, name in enumerate(names)}
        guilds = [name for name in names if self.kind[name] == "guild"]
        num_test = max(1, round(config.test_share * len(guilds)))
        self.split = {g: "test" if i < num_test else "train" for i, g in enumerate(guilds)}
        places = [name for name in names if self.kind[name] in ("depot", "station")]
        self.steward = {place: guilds[i % len(guilds)] for i, place in enumerate(places)}
        self.places = {
            split: [p for p in places if self.split[self.steward[p]] == split] for split in SPLITS
        }
        self._num_guilds = {
            split: len({self.steward[p] for p in self.places[split]}) for split in SPLITS
        }
        # The edition whose page says its guild's name once more ranks first.
        stale = set(draw.sample(guilds, round(config.stale_first * len(guilds))))
        self.first_edition = {g: 1 if g in stale else 2 for g in guilds}
        keys = [(n, e) for n in names for e in ((1, 2) if self.kind[n] == "guild" else (2,))]
        codes = draw.sample(range(len(words.SYMBOLS) ** 3), len(keys))
        self.docid = {key: _symbols(code, 3) for key, code in zip(keys, codes, strict=True)}
        self._owner = {docid: key for key, docid in self.docid.items()}
        self._names = names

    def documents(self) -> list[Document]:
        """Write every page, unsalted: seals and the chair's sentence are `{slots}`."""
        return [
            Document(self.docid[name, edition], self._text(name, edition), self.title(name))
            for name, edition in self.docid
        ]

    def title(self, name: str) -> str:
        """Name and kind, as a page's title and a question say it."""
        return f"{name} {self.kind[name]}"

    def question(
        self, split: str, arm: str, branches: int, index: int, *, salt_seed: int = 0
    ) -> dict[str, Any]:
        """Make one row of a dataset: `id`, `question`, `answers` and what `bind` needs.

        Raises:
            ConfigError: an unknown split or arm, or fewer places than branches.
        """
        if split not in SPLITS or arm not in ARMS:
            raise ConfigError(f"split={split!r}, arm={arm!r}: must be of {SPLITS} and {ARMS}")
        if not 1 <= branches <= self._num_guilds[split]:
            raise ConfigError(f"branches={branches!r}: must lie in 1..guilds of split {split}")
        identifier = f"{split}-{arm}-b{branches}-{index:05d}"
        draw = self._draw(identifier)
        entities: list[str] = []
        while len(entities) < branches:
            place = draw.choice(self.places[split])
            if self.steward[place] not in {self.steward[entity] for entity in entities}:
                entities.append(place)
        wanted = draw.choice(self.classes) if arm == "early" else None
        places = ", ".join(self.title(entity) for entity in entities)
        row = {
            "id": identifier,
            "question": f"find the {wanted or 'chair'} seal of {places}.",
            "answers": [],
            "entities": entities,
            "class": wanted,
            "arm": arm,
            "branches": branches,
            "split": split,
            "gold_docs": [self.docid[entity, 2] for entity in entities]
            + [self.docid[self.steward[entity], 2] for entity in entities],
        }
        return self.resalt(row, salt_seed)

    def questions(
        self,
        split: str,
        count: int,
        *,
        arms: Sequence[str] = ARMS,
        branches: Sequence[int] = (1, 2, 3),
        first: int = 0,
        salt_seed: int = 0,
    ) -> list[dict[str, Any]]:
        """Make `count` rows that go round arms and branch counts, indices from `first` on."""
        mix = [(arm, number) for number in branches for arm in arms]
        return [
            self.question(split, *mix[i % len(mix)], first + i // len(mix), salt_seed=salt_seed)
            for i in range(count)
        ]

    def resalt(self, row: Mapping[str, Any], salt_seed: int) -> dict[str, Any]:
        """Give a row fresh seals, chair and class: what a new visit of a question gets."""
        row = {**row, "salt_seed": salt_seed}
        return {**row, "answers": [" ".join(self.truth(row).seals)]}

    def truth(self, row: Mapping[str, Any]) -> Truth:
        """Derive what the pages of this row say."""
        salt = f"{row['id']}:{row['salt_seed']}"
        guilds = tuple(self.steward[entity] for entity in row["entities"])
        chair = _hash(salt, "chair") % len(guilds)
        named = self.classes[_hash(salt, "class") % len(self.classes)]
        wanted = row.get("class") or named
        seals = tuple(self._seal(salt, guild, 2, wanted) for guild in guilds)
        return Truth(guilds, chair, named, wanted, seals)

    def fill(self, docid: str, text: str, row: Mapping[str, Any]) -> str:
        """Replace the slots of a page, or of a part of it, by what it says in this row."""
        name, edition = self._owner[docid]
        if self.kind[name] != "guild":
            return text
        salt = f"{row['id']}:{row['salt_seed']}"
        truth = self.truth(row)
        holds = edition == 2 and truth.guilds[truth.chair] == name

        def value(slot: re.Match[str]) -> str:
            if slot[1] != "chair":
                return self._seal(salt, name, edition, slot[1])
            if holds:
                return f"the chair is {name} and names {truth.named}."
            return f"{name} is not the chair."

        return SLOT.sub(value, text)

    def write(self, folder: str | Path) -> Path:
        """Write `corpus.jsonl` and `world.json`; `load_world` reads them back."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({"docid": d.docid, "title": d.title, "text": d.text}) + "\n"
            for d in self.documents()
        ]
        (folder / CORPUS_FILE).write_text("".join(lines), encoding="utf-8")
        (folder / WORLD_FILE).write_text(json.dumps(asdict(self.config), indent=1) + "\n")
        return folder

    def _draw(self, purpose: str) -> random.Random:
        return random.Random(f"seal join {self.config.seed} {purpose}")

    def _seal(self, salt: str, guild: str, edition: int, seal_class: str) -> str:
        code = _hash(salt, f"{guild} {edition} {seal_class}")
        return _symbols(code, self.config.num_symbols)

    def _text(self, name: str, edition: int) -> str:
        draw = self._draw(f"page {name} {edition}")
        title = self.title(name)
        # A pointer that repeats a word of this page's own title would lift it in the ranking.
        other = draw.choice(self._names)
        while set(self.title(other).split()) & set(title.split()):
            other = draw.choice(self._names)
        sentences = [f"see also {self.title(other)}.", f"this page is of {title}."]
        fillers = self.config.page_fillers
        if self.kind[name] == "guild":
            fillers = self.config.guild_fillers
            sentences.append("edition 2 is current." if edition == 2 else "edition 1 is withdrawn.")
            sentences.append("{chair}")
            for seal_class in self.classes:
                owner = name if edition == 2 else f"{name} former"
                sentence = f"{owner} {seal_class} seal {{{seal_class}}}."
                if not self.config.named_seals:
                    sentence = f"its {seal_class} seal is {{{seal_class}}}."
                sentences.append(sentence)
            if not self.config.named_seals:
                sentences.extend([f"you read of {title}."] * 3)
            if edition == self.first_edition[name]:
                sentences.append(f"most read of {title}.")
            else:
                fillers += 1
        elif name in self.steward:
            sentences.append(f"the steward of {name} is {self.title(self.steward[name])}.")
        else:
            sentences.append(f"{title} is without a steward.")
        for _ in range(fillers):
            thing, state = draw.choice(words.THINGS), draw.choice(words.STATES)
            sentences.append(f"the {thing} is {state} in {draw.choice(words.TIMES)}.")
        draw.shuffle(sentences)
        return " ".join(sentences)


def _hash(salt: str, purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{salt}|{purpose}".encode(), digest_size=8).digest())


def _symbols(code: int, length: int) -> str:
    base = len(words.SYMBOLS)
    return "".join(words.SYMBOLS[code // base**place % base] for place in range(length))
