"""The page of an episode: everything is on it, nothing that a corpus wrote becomes markup."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.errors import ConfigError
from octopus_trl.report.drawing import reads_of
from octopus_trl.report.episode import episode_page, write_episode
from octopus_trl.report.lanes import lay_out, sharers
from octopus_trl.trace import Segment, ThreadRecord, Trace
from octopus_trl.trace_files import write_traces
from tests.report.large_episode import large_episode

ROOT = Path(__file__).parents[2]
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>{{DATA}}<!--"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def small() -> Trace:
    """Root forks 1 and 2; 2 leaves a dead end; the root mounts both."""
    segments = [
        Segment(0, 0, None, "prompt", [1] * 63, time_s=0.0),
        Segment(1, 0, 0, "action", [2, 3], logps=[-0.5, -2.25], time_s=0.5),
        Segment(2, 1, 1, "tool", [4] * 65, time_s=0.6),
        Segment(3, 1, 2, "action", [5], logps=[-0.125], time_s=1.0),
        Segment(4, 2, 1, "tool", [6], time_s=0.7),
        Segment(5, 2, 4, "action", [7, 7], logps=[-1.0, -1.0], time_s=1.1),
        Segment(6, 2, 4, "tool", [8] * 64, time_s=1.2),
        Segment(7, 2, 6, "action", [9], logps=[-3.0], time_s=2.0),
        Segment(8, 0, 1, "tool", [10] * 5, [2, 3, 4, 6, 7], time_s=2.1),
        Segment(9, 0, 8, "action", [11], logps=[-0.25], time_s=3.0),
    ]
    threads = [
        ThreadRecord(0, None, "", "committed", 9),
        ThreadRecord(1, 0, HOSTILE, "committed", 3),
        ThreadRecord(2, 0, "the other", "cut", 7),
    ]
    events = [{"type": "turn", "thread": 0, "segment": 1, "calls": [["fork", "ok"]] * 2}]
    meta = {"question": HOSTILE, "result": HOSTILE}
    return Trace("e<1>", "p", 0, 1.0, False, threads, segments, events, meta).place().check()


class Page(HTMLParser):
    """Reads the page as a browser would and keeps elements, scripts and the JSON block."""

    VOID = ("meta", "input", "br", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []
        self.data: dict[str, Any] = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += text

    def ids(self, name: str) -> list[int]:
        return [int(str(attrs[name])) for _, attrs in self.elements if name in attrs]


def decode(tokens: Any) -> str:
    return "".join(HOSTILE if token == 4 else chr(96 + token % 26) for token in tokens)


def test_every_thread_segment_and_mount_is_drawn_once() -> None:
    trace = small()
    page = Page(episode_page(trace, decode=decode))
    assert page.ids("data-thread") == [0, 1, 2]
    assert page.ids("data-segment") == list(range(10))
    reads = zip(
        page.ids("data-source"), page.ids("data-mount"), page.ids("data-reader"), strict=True
    )
    assert list(reads) == [(1, 3, 8), (2, 7, 8)], "an arc a thread that was read, from its end"
    assert page.ids("data-lent") == trace.segments[8].mounts
    assert [segment["length"] for segment in page.data["segments"]] == trace.lengths
    assert page.data["segments"][1]["logps"] == [-0.5, -2.25]
    assert page.data["segments"][2]["calls"] == ["fork (ok)", "fork (ok)"]
    assert page.data["timed"] is True


def test_hostile_text_stays_text() -> None:
    text = episode_page(small(), decode=decode)
    page = Page(text)
    assert [tag for tag, _ in page.elements].count("script") == len(page.scripts) == 2
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert not [attrs for _, attrs in page.elements if any(n.startswith("on") for n in attrs)]
    assert page.data["segments"][2]["text"] == HOSTILE * 65
    assert page.data["threads"][1]["task"] == HOSTILE
    assert "<script>document" not in text
    assert "<!--" not in text


def test_the_script_never_builds_markup_and_its_hash_is_the_one_allowed() -> None:
    text = episode_page(small())
    script = Page(text).scripts[1]
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in script
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert re.findall(r"(?:src|href)=\"?(\w+:)?//", text) == []


def test_without_a_tokenizer_ids_are_shown() -> None:
    segments = Page(episode_page(small())).data["segments"]
    assert segments[2]["text"] is None
    assert segments[2]["tokens"] == [4] * 65


def test_left_branches_are_greyed_and_beside_the_chain_that_went_on() -> None:
    trace = small()
    lanes = lay_out(trace)
    assert lanes.rewound == {5}
    assert lanes.rows[5] == lanes.first_row[2] + 1
    assert lanes.rows[7] == lanes.rows[4] == lanes.first_row[2]
    grey = [
        attrs
        for _, attrs in Page(episode_page(trace)).elements
        if "rewound" in str(attrs.get("class")) and "data-segment" in attrs
    ]
    assert [attrs["data-segment"] for attrs in grey] == ["5"]


def test_children_lie_below_their_parent_and_a_read_is_a_thread_not_a_segment() -> None:
    trace = small()
    trace.threads.append(ThreadRecord(3, 1, "of 1", "committed", 10))
    trace.segments.append(Segment(10, 3, 3, "tool", [1] * 5))
    trace.segments[9].mounts = []
    trace.place().check()
    rows = lay_out(trace).first_row
    assert sorted(rows, key=lambda thread: rows[thread]) == [0, 1, 3, 2]
    page = Page(episode_page(trace))
    depths = [str(a["style"]).rpartition("--depth:")[2] for t, a in page.elements if t == "li"]
    assert page.ids("data-thread") == [0, 1, 2, 3]
    assert depths == ["0", "1", "1", "2"]
    assert [read.segments for read in reads_of(trace)] == [[2, 3], [4, 6, 7]]


def test_over_time_a_thread_goes_on_after_its_dead_end_not_beside_it() -> None:
    segments = Page(episode_page(small())).data["segments"]
    assert segments[5]["time"] == [0.7, 1.1]
    assert segments[6]["time"] == [1.1, 1.2], (
        "its parent closed at 0.7, its thread was busy until 1.1"
    )
    assert segments[4]["time"] == [0.5, 0.7]


def test_sharers_are_those_that_continue_and_those_that_mount() -> None:
    heirs, readers = sharers(small())
    assert heirs[0] == heirs[1] == [1, 2]
    assert readers[2] == readers[7] == [0]
    assert readers[5] == heirs[3] == []


def test_no_two_segments_of_a_row_overlap() -> None:
    generator = random.Random(20261130)
    for _ in range(20):
        trace = grown(generator, 60)
        lanes = lay_out(trace)
        taken: dict[int, list[tuple[int, int]]] = {}
        for segment in trace.segments:
            taken.setdefault(lanes.rows[segment.id], []).append((segment.start, segment.end))
        for spans in taken.values():
            spans.sort()
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert max(lanes.rows) < lanes.num_rows


def grown(generator: random.Random, num: int, most: int = 65) -> Trace:
    """A random episode without mounts: threads go on, fork and rewind."""
    segments = [Segment(0, 0, None, "prompt", [1] * generator.randint(1, most))]
    heads = {0: 0}
    parents: dict[int, int | None] = {0: None}
    for index in range(1, num):
        thread = generator.choice(list(heads))
        parent = heads[thread]
        if generator.random() < 0.2:
            parents[len(heads)] = thread
            thread = len(heads)
        elif generator.random() < 0.3:
            above = segments[parent].parent
            if segments[parent].thread == thread and above is not None:
                parent = above
        kind = generator.choice(("action", "tool"))
        segments.append(
            Segment(index, thread, parent, kind, [2] * generator.randint(1, most), logps=None)
        )
        heads[thread] = index
    threads = [ThreadRecord(thread, parents[thread], head=heads[thread]) for thread in parents]
    return Trace("grown", "p", threads=threads, segments=segments).place().check()


def test_a_long_episode_makes_a_page_of_its_text_not_of_its_tokens() -> None:
    trace = grown(random.Random(3), 400, most=1000)
    assert sum(trace.lengths) > 150_000
    text = episode_page(trace, decode=lambda tokens: "word " * len(tokens))
    drawing = text[text.index('<svg id="drawing"') : text.rindex("</svg>")]
    assert len(drawing) < 1000 * len(trace.segments)


def test_a_wrong_page_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="page_size=0"):
        write_episode(small(), tmp_path / "e.html", page_size=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("extra", "code", "says"),
    [([], 0, "e<1>"), (["--episode", "none"], 2, "no episode 'none'")],
)
def test_the_command_writes_a_page_or_says_what_is_wrong(
    tmp_path: Path, extra: list[str], code: int, says: str
) -> None:
    write_traces(tmp_path / "t.jsonl", [small()])
    out = tmp_path / "e.html"
    command = [sys.executable, "scripts/view.py", str(tmp_path / "t.jsonl"), "--output", str(out)]
    done = subprocess.run(command + extra, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert says in done.stdout + done.stderr
    assert out.exists() == (code == 0)


def opened(page: Path, where: str = "") -> str:
    """Give the document that Chromium has made of a page."""
    assert CHROMIUM is not None
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=2000"),
        *("--window-size=1400,900", "--dump-dom", f"file://{page}{where}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "data-ready=" in done.stdout, done.stderr[-2000:]
    return done.stdout


needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install chromium"
)


@needs_chromium
def test_chromium_opens_the_page_and_shows_a_segment_with_hostile_text_as_text(
    tmp_path: Path,
) -> None:
    page = tmp_path / "e.html"
    write_episode(small(), page, decode=decode)
    dom = opened(page, "#segment-2")
    assert 'data-ready="10"' in dom
    assert "<h2>segment 2: tool</h2>" in dom
    assert "<title>e&lt;1&gt;</title>" in dom
    panel = dom[dom.index("<pre>") :]
    assert panel.startswith("<pre>&lt;/script&gt;&lt;script&gt;document.title=")
    assert "<img" not in dom


@needs_chromium
def test_chromium_opens_an_episode_of_200_000_tokens(tmp_path: Path) -> None:
    page = tmp_path / "e.html"
    trace = large_episode(lambda text: [ord(char) for char in text], tokens=100_000)
    assert sum(trace.lengths) > 200_000
    write_episode(trace, page, decode=lambda tokens: "".join(map(chr, tokens)))
    assert page.stat().st_size < 8 * sum(trace.lengths)
    dom = opened(page, "#segment-30&axis=time&theme=dark")
    assert f'data-ready="{len(trace.segments)}"' in dom
    assert "<h2>segment 30: " in dom
    assert 'data-theme="dark"' in dom
    assert " s</text>" in dom[dom.index('id="ruler"') :], "the ruler counts seconds"
    assert "<img" not in dom


@needs_chromium
def test_the_keyboard_walks_finds_and_zooms_and_tips_tell_of_what_is_under_the_pointer(
    tmp_path: Path,
) -> None:
    driver = """
    const said = [];
    const press = (key) => (document.activeElement || document.body).dispatchEvent(
      new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    const at = () => said.push(panel.querySelector("h2")?.textContent ?? "none");
    const walk = ["Right", "Right", "Down", "Down", "Left", "Up"];
    for (const key of walk) { press("Arrow" + key); at(); }
    press("Escape"); at();
    find("eee"); press("n"); at();
    const before = Number(svg.getAttribute("width")); press("+");
    said.push(Number(svg.getAttribute("width")) > before);
    const mouse = (node, type) => node.dispatchEvent(new MouseEvent(type, { bubbles: true }));
    mouse(mounts[0], "pointermove"); said.push(tip.textContent);
    mouse(bars[5], "click"); at();
    press("t"); said.push(axis.value);
    document.body.dataset.said = JSON.stringify(said);
    """
    text = episode_page(small(), decode=lambda tokens: "".join(chr(96 + t) for t in tokens))
    script = Page(text).scripts[1]
    digest = base64.b64encode(hashlib.sha256((script + driver).encode()).digest()).decode()
    text = text.replace(script, script + driver)
    page = tmp_path / "e.html"
    page.write_text(re.sub("'sha256-[^']+'", f"'sha256-{digest}'", text))
    (said,) = re.findall(r'data-said="([^"]+)"', opened(page))
    heads = json.loads(html.unescape(said))
    walked = ["0: prompt", "1: action", "2: tool", "4: tool", "4: tool", "2: tool"]
    assert heads[:6] == [f"segment {head}" for head in walked]
    assert heads[6:9] == ["none", "none", True]
    assert heads[9].startswith("thread 0 reads 66 tokens of thread 1")
    assert heads[10:] == ["segment 5: action", "time"]
