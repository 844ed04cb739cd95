"""A made-up episode of 200,000 tokens: ten children, pages, dead ends, reads, hostile text.

python -m tests.report.large_episode OUTPUT.jsonl
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

from octopus_trl.agent.recorder import Recorder
from octopus_trl.trace import Segment, ThreadRecord, Trace
from octopus_trl.trace_files import write_traces

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>{{DATA}}<!--"
_NAMES = re.findall(r"\w+", "amber basalt cedar dorsal ember fjord granite harbor inlet juniper")
_WORDS = re.findall(
    r"\S+",
    "the north gate was kept through winter by a guild of nine wardens whose ledger names each "
    "arrival with the seal of its depot and a toll in copper; after the flood of that spring the "
    "register moved to the upper station, where a clerk copied every line twice and signed below ",
)


class _Author:
    """Writes turns and results of threads with the clock that each has reached."""

    def __init__(self, encode: Any, draw: random.Random) -> None:
        self._encode, self._draw = encode, draw
        self.recorder = Recorder()
        self.heads: dict[int, int] = {}
        self.clock: dict[int, float] = {}
        self.events: list[dict[str, Any]] = []

    def prompt(self, text: str) -> None:
        self.clock[0] = 0.4
        self.heads[0] = self.recorder.add(0, None, "prompt", self._encode(text), time_s=0.4)

    def turn(self, thread: int, thought: str, *calls: tuple[str, str], parent: int = -1) -> int:
        """Sample a turn with its calls; the event of the turn follows those of its calls."""
        body = "".join(f"\n<tool_call>\n{name}({text})\n</tool_call>" for name, text in calls)
        tokens = self._encode(f"<think>\n{thought}\n</think>{body}<|im_end|>")
        logps = [-(abs(self._draw.gauss(0, 0.8)) ** 2) for _ in tokens]
        self.clock[thread] += 0.012 * len(tokens) + self._draw.random()
        head = self.heads[thread] if parent < 0 else parent
        at = self.recorder.add(
            thread, head, "action", tokens, logps=logps, time_s=round(self.clock[thread], 3)
        )
        self.heads[thread] = at
        named = [[name, "ok"] for name, _ in calls]
        self.events.append({"type": "turn", "thread": thread, "segment": at, "calls": named})
        return at

    def result(self, thread: int, text: str, mounts: list[int] | None = None) -> int:
        tokens = self._encode(f"<tool_response>\n{text}\n</tool_response>")
        self.clock[thread] += 0.3 + 2e-5 * len(tokens)
        self.heads[thread] = self.recorder.add(
            thread,
            self.heads[thread],
            "tool",
            tokens,
            mounts=mounts or [],
            time_s=round(self.clock[thread], 3),
        )
        return self.heads[thread]

    def page(self, tokens: int, title: str) -> str:
        words = self._draw.choices(_WORDS, k=max(tokens * 3 // 8, 5))
        for at in range(0, len(words), 60):
            words[at] = f"{words[at]}.\n\n{self._draw.choice(_NAMES).capitalize()}"
        return f"{title}\npage 1 of 3\n" + " ".join(words)


def large_episode(encode: Any, *, tokens: int = 200_000, seed: int = 0) -> Trace:
    """Make the episode.

    Args:
        encode: gives the token ids of a text.
        tokens: about how many in all.
    """
    draw = random.Random(seed)
    author = _Author(encode, draw)
    question = (
        "Which of the ten guilds that kept a gate between the flood and the fire also signed the "
        f"register of the upper station twice? {HOSTILE}"
    )
    author.prompt(f"<|im_start|>system\nYou work as many threads.\n{question}<|im_end|>")
    tasks = [f"find the register of the {name} guild" for name in _NAMES]
    tasks[3] = HOSTILE
    trunk = author.turn(
        0, "Ten guilds, one thread each.", *(("fork", f'task="{task}"') for task in tasks)
    )
    threads = [ThreadRecord(0, None, "", "committed")]
    for child, task in enumerate(tasks, start=1):
        author.heads[child], author.clock[child] = trunk, author.clock[0]
        author.result(child, f"you are thread {child}; task: {task}; budget 32768 tokens")
        threads.append(ThreadRecord(child, 0, task, "cut" if child == 10 else "committed"))
    waited = author.result(0, "\n".join(f"forked thread {child}" for child in range(1, 11)))
    each = tokens // 10
    for child, name in enumerate(_NAMES, start=1):
        lookups = draw.randint(3, 7)
        for at in range(lookups):
            _look_up(
                author, child, name, each // (lookups + 1), dead_end=at == 1 and child % 3 == 0
            )
        author.turn(child, f"The {name} register is found.", ("commit", f'"{name}, folio {child}"'))
    author.clock[0] = max(author.clock.values())
    children = list(range(1, 11))
    author.events.append({"type": "wait", "thread": 0, "targets": children})
    author.turn(0, "Wait for all of them.", ("wait_threads", str(children)), parent=waited)
    author.result(0, "\n".join(f"thread {child}: committed" for child in children))
    for first in (1, 4, 7):
        group = children[first - 1 : first + 2 if first < 7 else 10]
        author.turn(0, f"Read {group}.", *(("read_thread", str(child)) for child in group))
        spans = [_live_span(author, child) for child in group]
        lines = [f"mounted {len(span)} segments of thread {c}" for c, span in zip(group, spans)]
        author.result(0, "\n".join(lines), [segment for span in spans for segment in span])
    author.turn(0, "Two signed twice; one kept a gate.", ("commit", '"the juniper guild"'))
    for record in threads:
        record.head = author.heads[record.id]
    meta = {"question": question, "result": f"the juniper guild {HOSTILE}", "hops": 10}
    return Trace(
        f"large-{seed}", "large", 45, 1.0, False, threads, author.recorder.segments,
        author.events, meta,
    ).check()  # fmt: skip


def _look_up(author: _Author, child: int, name: str, size: int, *, dead_end: bool) -> None:
    author.turn(child, f"Search for the {name} guild.", ("search", f'query="{name} register"'))
    hits = [
        f"{number} | {name} guild, folio {number} | {author.page(40, '')}" for number in range(5)
    ]
    author.result(child, "\n".join(hits))
    base = author.heads[child]
    author.turn(child, "Open the best hit.", ("open", 'docid="3", page=1'))
    author.result(child, author.page(size, f"{name} guild {HOSTILE if child == 2 else ''}"))
    if dead_end:
        author.turn(
            child, "A dead end: another edition.", ("rewind", 'turn=1, note="wrong edition"')
        )
        author.events.append({"type": "rewind", "thread": child, "to": 1})
        author.heads[child] = base
        author.result(child, "back at turn 1; note: wrong edition")
    author.turn(child, f"Folio {child} names the {name} gate." + author.page(90, ""))
    author.result(child, "no call in this turn; go on")


def _live_span(author: _Author, child: int) -> list[int]:
    segments: list[Segment] = author.recorder.segments
    span, at = [], author.heads[child]
    while segments[at].thread == child:
        span.append(at)
        parent = segments[at].parent
        assert parent is not None
        at = parent
    return span[::-1]


if __name__ == "__main__":
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("data/policy/tiny-hybrid")
    made = large_episode(lambda text: tokenizer.encode(text, add_special_tokens=False))
    write_traces(Path(sys.argv[1]), [made])
    sys.stdout.write(f"{made!r}\n")
