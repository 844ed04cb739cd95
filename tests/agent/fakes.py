"""A tokenizer, a corpus and an engine without tensors, for tests of the agent.

`ScriptedEngine` follows `EngineLike` on plain lists: every token that it is fed gets an identity,
so a test can ask which tokens a cursor sees, by ancestry and by mount, and at which positions.
"""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octopus_trl.agent.thread import Thread, draw_seed
from octopus_trl.errors import ClosedCursor, ConfigError, ToolError
from octopus_trl.protocols import Finished, Page, SamplingParams, SearchHit

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@cache
def template(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def byte_tokenizer(
    name: str = "qwen3_5_nothink_training", merges: Sequence[tuple[str, str]] = ()
) -> Any:
    """Build a tokenizer of bytes and Qwen's control tokens with one of TRL's templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template(name)
    return tokenizer


def xml_call(name: str, **arguments: Any) -> str:
    """Write a call as Qwen3.5 does."""
    body = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


class ListCorpus:
    """A corpus of texts by docid; a text may be a function, called when it is opened."""

    def __init__(self, **texts: str | Callable[[], str]) -> None:
        self.texts = texts
        self.threads: set[int] = set()

    def search(self, query: str, k: int) -> list[SearchHit]:
        self.threads.add(threading.get_ident())
        found = [d for d, t in self.texts.items() if callable(t) or query in t or query in d]
        return [SearchHit(d, 1.0, f"title {d}", f"snippet of {d}") for d in found[:k]]

    def open(self, docid: str, page: int) -> Page:
        self.threads.add(threading.get_ident())
        if docid not in self.texts:
            raise ToolError(f"no document {docid}")
        text = self.texts[docid]
        return Page(docid, f"title {docid}", text() if callable(text) else text, page, 1)

    def fingerprint(self) -> str:
        return ",".join(self.texts)


@dataclass(eq=False)
class ListCursor:
    """A chain of token identities and the mounts along it, each with its place in the chain."""

    chain: list[int]
    fork_len: int = 0
    mounts: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    closed: bool = False
    busy: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.chain)

    def mounted(self) -> set[int]:
        return set().union(*(tokens for _, tokens in self.mounts))


@dataclass
class Fed:
    """What a cursor was after one turn: identities of its chain and of what it sees by mount."""

    chain: list[int]
    mounted: frozenset[int]
    num_sampled: int


Policy = Callable[[Callable[[], list[int]], SamplingParams], Sequence[int]]


class ScriptedEngine:
    """Turns come from `policy(chain, sampling)`, where `chain()` gives the tokens so far.

    Each takes a number of steps drawn from `order_seed`, so turns end in any order.
    """

    def __init__(self, policy: Policy, *, order_seed: int = 0, most_steps: int = 3) -> None:
        self.policy = policy
        self.policy_version = 0
        self.num_free_pages = 1 << 30
        self.fed: list[Fed] = []
        self.cursors: list[ListCursor] = []
        self.sampled: list[list[int]] = []
        self.num_prefilled = 0
        self.rule, self.exchange = "jump", "mount"
        self.num_opened = self.num_forks = self.num_mounts = self.num_rewinds = 0
        self.fail_on: Callable[[str, Any], None] = lambda operation, argument: None
        self._token: list[int] = []
        self._position: list[int] = []
        self._queue: dict[int, list[Any]] = {}
        self._next_ticket = 0
        self._most_steps = most_steps
        self._rng = random.Random(order_seed)

    def open(self, tokens: Sequence[int]) -> ListCursor:
        self.fail_on("open", tokens)
        self.num_opened += 1
        self.num_prefilled += len(tokens)
        return self.extend(self._new([], 0, []), tokens)

    def fork(self, cursor: ListCursor) -> ListCursor:
        self._usable(cursor)
        self.fail_on("fork", cursor)
        self.num_forks += 1
        assert not cursor.mounts or cursor.mounts[-1][0] < len(cursor.chain), (
            "a fork would inherit a mount that its parent's turn has not seen"
        )
        return self._new(list(cursor.chain), len(cursor.chain), list(cursor.mounts))

    def extend(self, cursor: ListCursor, tokens: Sequence[int]) -> ListCursor:
        self._usable(cursor)
        position = self.position(cursor)
        for token in tokens:
            cursor.chain.append(len(self._token))
            self._token.append(token)
            self._position.append(position)
            position += 1
        return cursor

    def mount(
        self,
        cursor: ListCursor,
        source: ListCursor,
        since: ListCursor | None = None,
        *,
        position: str = "jump",
        exchange: str = "mount",
    ) -> ListCursor:
        self._usable(cursor)
        self.rule, self.exchange = position, exchange
        assert not source.closed, "a source is open until its episode ends"
        assert not source.busy, "a source is mounted at a closed boundary"
        self.fail_on("mount", (cursor, source))
        self.num_mounts += 1
        first = source.fork_len if since is None else len(since.chain)
        new = set(source.chain[first:]) - set(cursor.chain) - cursor.mounted()
        cursor.mounts.append((len(cursor.chain), frozenset(new)))
        return cursor

    def rewind(self, cursor: ListCursor, num_tokens: int) -> ListCursor:
        self._usable(cursor)
        self.fail_on("rewind", cursor)
        self.num_rewinds += 1
        assert cursor.fork_len <= num_tokens <= len(cursor.chain)
        del cursor.chain[num_tokens:]
        cursor.mounts = [mount for mount in cursor.mounts if mount[0] < num_tokens]
        return cursor

    def close(self, cursor: ListCursor) -> None:
        assert not cursor.closed, "closed twice"
        cursor.closed = True

    def position(self, cursor: ListCursor) -> int:
        own = self._position[cursor.chain[-1]] + 1 if cursor.chain else 0
        if self.rule in ("unshifted", "rerotate"):
            return own
        if self.rule == "reencode":
            end = len(cursor.chain)
            return own + sum(len(tokens) for at, tokens in cursor.mounts if at == end)
        return max([own, *(self._position[token] + 1 for token in cursor.mounted())])

    def submit(
        self,
        cursor: ListCursor,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        until: Collection[int],
    ) -> int:
        self._usable(cursor)
        self.fail_on("submit", tokens)
        before = len(cursor.chain)
        self.extend(cursor, tokens)
        cursor.busy = True
        self._next_ticket += 1
        steps = self._rng.randint(1, self._most_steps)
        self._queue[self._next_ticket] = [steps, cursor, sampling, until, before]
        return self._next_ticket

    def step(self) -> list[Finished]:
        due = []
        for ticket, work in list(self._queue.items()):
            work[0] -= 1
            if work[0] <= 0:
                due.append(self._finish(ticket))
        self._rng.shuffle(due)
        return due

    def cancel(self, ticket: int) -> tuple[list[int], list[float]]:
        """Take a turn out as if half of it had been sampled."""
        if ticket not in self._queue:
            raise ConfigError(f"ticket={ticket}: no such turn")
        _, cursor, sampling, until, before = self._queue.pop(ticket)
        tokens = self._sample(cursor, sampling, until)
        tokens = tokens[: len(tokens) // 2] if self._rng.random() < 0.5 else []
        cursor.busy = False
        if tokens:
            self._keep(cursor, tokens, before)
        else:
            del cursor.chain[before:]
        return tokens, [-1.0] * len(tokens)

    def generate(self, cursors: Any, sampling: Any, *, until: Any) -> Any:
        raise AssertionError("episodes submit and step")

    def stats(self) -> dict[str, Any]:
        return {}

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def tokens(self, chain: Iterable[int]) -> list[int]:
        """Give the token ids of identities."""
        return [self._token[token] for token in chain]

    def positions(self, chain: Iterable[int]) -> list[int]:
        """Give the positions of identities."""
        return [self._position[token] for token in chain]

    @property
    def num_open(self) -> int:
        """Cursors that nobody closed."""
        return sum(not cursor.closed for cursor in self.cursors)

    def _finish(self, ticket: int) -> Finished:
        _, cursor, sampling, until, before = self._queue.pop(ticket)
        cursor.busy = False
        try:
            self.fail_on("sample", cursor)
            tokens = self._sample(cursor, sampling, until)
        except RuntimeError as error:
            del cursor.chain[before:]
            return Finished(ticket, [], [], "error", str(error))
        self._keep(cursor, tokens, before)
        reason: Any = "stop" if tokens[-1] in until else "length"
        return Finished(ticket, tokens, [-0.5] * len(tokens), reason)

    def _sample(
        self, cursor: ListCursor, sampling: SamplingParams, until: Collection[int]
    ) -> list[int]:
        tokens = list(self.policy(lambda: [self._token[token] for token in cursor.chain], sampling))
        for index, token in enumerate(tokens):
            if token in until:
                tokens = tokens[: index + 1]
                break
        return tokens[: sampling.max_tokens]

    def _keep(self, cursor: ListCursor, tokens: list[int], before: int) -> None:
        self.num_prefilled += len(cursor.chain) - before
        self.extend(cursor, tokens)
        self.sampled.append(tokens)
        self.fed.append(Fed(list(cursor.chain), frozenset(cursor.mounted()), len(tokens)))

    def _new(self, chain: list[int], fork_len: int, mounts: Any) -> ListCursor:
        cursor = ListCursor(chain, fork_len, mounts)
        self.cursors.append(cursor)
        return cursor

    @staticmethod
    def _usable(cursor: ListCursor) -> None:
        if cursor.closed:
            raise ClosedCursor("closed")
        assert not cursor.busy, "a cursor with a turn in flight is left alone"


class Script:
    """A policy that says, for thread N's k-th turn, what a test wrote down.

    The thread is read from the last text of the form `you are thread N` on the chain and the turn
    from how often this thread was asked, so it serves one episode at a time.
    """

    def __init__(self, tokenizer: Any, turns: Mapping[int, Sequence[str]]) -> None:
        self.tokenizer = tokenizer
        self.turns = turns
        self.asked: dict[int, int] = {}
        self.contexts: dict[tuple[int, int], str] = {}

    def __call__(self, chain: Callable[[], list[int]], sampling: SamplingParams) -> list[int]:
        text = self.tokenizer.decode(chain())
        thread = self._thread(text, sampling)
        turn = self.asked.get(thread, 0)
        self.asked[thread] = turn + 1
        self.contexts[thread, turn] = text
        said = self.turns.get(thread, [])
        words = said[turn] if turn < len(said) else xml_call("commit", result=f"end of {thread}")
        ids: list[int] = self.tokenizer.encode(
            words.removesuffix("<cut>"), split_special_tokens=True
        )
        return ids if words.endswith("<cut>") else [*ids, self.tokenizer.eos_token_id]

    def _thread(self, text: str, sampling: SamplingParams) -> int:
        if "you are thread " not in text:
            return 0
        return int(text.rsplit("you are thread ", 1)[1].split(";")[0])

    def reply(self, thread: int, turn: int) -> str:
        """Give the tool text that the thread saw just before its turn (from 0)."""
        return self.contexts[thread, turn].rsplit("<tool_response>", 1)[1]


class Seeded(Script):
    """A script that knows threads by the seed of their turn, as a chain may quote other threads."""

    def __init__(
        self, tokenizer: Any, turns: Mapping[int, Sequence[str]], prompt_id: str = "q"
    ) -> None:
        super().__init__(tokenizer, turns)
        identity = {"seed": 0, "step": 0, "prompt_id": prompt_id, "rollout": 0}
        self._threads = {
            draw_seed(identity, Thread(thread, None, "", 0, num_turns=turn)): thread
            for thread in range(8)
            for turn in range(40)
        }

    def _thread(self, text: str, sampling: SamplingParams) -> int:
        assert sampling.seed is not None
        return self._threads[sampling.seed]


class RandomPolicy:
    """A policy that draws legal, refused and malformed calls from the turn's own seed."""

    def __init__(self, tokenizer: Any, *, longest: int = 4) -> None:
        self.tokenizer = tokenizer
        self.longest = longest

    def __call__(self, chain: Callable[[], list[int]], sampling: SamplingParams) -> list[int]:
        rng = random.Random(sampling.seed)
        parts = [rng.choice(("", "let me see\n"))]
        parts += [self._call(rng) for _ in range(rng.randint(0 if rng.random() < 0.1 else 1, 3))]
        ids: list[int] = self.tokenizer.encode("\n".join(parts))
        if ids and rng.random() < 0.08:
            return ids[: rng.randint(1, len(ids))]
        return [*ids, *self.tokenizer.encode("<|im_end|>")]

    def _call(self, rng: random.Random) -> str:
        pick = rng.random()
        thread = rng.randint(-1, 7)
        if pick < 0.25:
            return xml_call("fork", task=f"look up part {rng.randint(0, 99)}")
        if pick < 0.45:
            return xml_call("read_thread", thread_id=thread)
        if pick < 0.60:
            ids = [rng.randint(0, 6) for _ in range(rng.randint(1, 3))]
            return xml_call(rng.choice(("wait", "wait_threads")), thread_ids=ids)
        if pick < 0.72:
            return xml_call("rewind", turn=rng.randint(-1, 4), note="a lesson")
        if pick < 0.75:
            return xml_call(rng.choice(("commit", "done")), result=f"found {thread}")
        if pick < 0.84:
            return xml_call("search", query=rng.choice(("a", "zzz", " ")))
        if pick < 0.92:
            return xml_call("open", docid=rng.choice(("a", "evil", "gone")))
        return rng.choice(
            (
                "<tool_call>\n<function=fork>\n</tool_call>",
                xml_call("fly", to="the moon"),
                xml_call("rewind", turn="seven", note="x"),
                xml_call("commit", answer="x"),
                "<tool_call>",
            )
        )


def hang(seconds: float) -> Callable[[], str]:
    """Make a page that takes its time."""

    def page() -> str:
        time.sleep(seconds)
        return "late"

    return page
