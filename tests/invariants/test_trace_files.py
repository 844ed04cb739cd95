"""Traces on disk: whole lines only, whatever kills the writer; a bad line is named by number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octopus_trl.errors import ConfigError, TraceError
from octopus_trl.trace import Trace
from octopus_trl.trace_files import TraceWriter, read_traces, write_traces
from tests.tiny import random_trace

TRACES = [random_trace(seed, steps=6, max_tokens=40, logps=True) for seed in range(5)]


def lines_of(traces: list[Trace]) -> list[str]:
    return [json.dumps(trace.to_dict()) for trace in traces]


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "traces.jsonl"
    with TraceWriter(path) as writer:
        for trace in TRACES:
            writer.append(trace)
    assert list(read_traces(path)) == TRACES
    assert len(path.read_text().splitlines()) == len(TRACES)
    write_traces(tmp_path / "again.jsonl", TRACES)
    assert list(read_traces(tmp_path / "again.jsonl")) == TRACES


def test_each_append_is_on_disk_before_it_returns(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    writer = TraceWriter(path)
    for count, trace in enumerate(TRACES, start=1):
        writer.append(trace)
        assert list(read_traces(path)) == TRACES[:count]
    writer.close()


@pytest.mark.parametrize(
    "bad",
    [
        b"not json",
        b"{",
        b"3",
        b"null",
        b"[]",
        b"{}",
        b'{"episode_id": "e"}',
        b'"\xff\xfe"',
        b"\xff\xfe\x00",
        b'{"schema": 1} {"schema": 1}',
    ],
)
@pytest.mark.parametrize("number", [1, 3, 6])
def test_one_bad_line_is_reported_by_its_number(tmp_path: Path, bad: bytes, number: int) -> None:
    lines = [line.encode() for line in lines_of(TRACES)]
    lines.insert(number - 1, bad)
    path = tmp_path / "traces.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    reader = read_traces(path)
    for trace in TRACES[: number - 1]:
        assert next(reader) == trace
    with pytest.raises(TraceError, match=rf"traces\.jsonl.*\b{number}\b"):
        next(reader)


def test_a_line_that_breaks_a_rule_is_reported_with_number_and_segment(tmp_path: Path) -> None:
    records = [trace.to_dict() for trace in TRACES]
    records[2]["segments"][1]["start"] += 1
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(TraceError, match=r"line 3.*segment 1\b"):
        list(read_traces(path))
    assert len(list(read_traces(path, check=False))) == len(TRACES)


def test_blank_lines_count_but_hold_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    first, second, *_ = lines_of(TRACES)
    path.write_text(f"{first}\n\n{second}\n\nbroken\n")
    reader = read_traces(path)
    assert [next(reader), next(reader)] == TRACES[:2]
    with pytest.raises(TraceError, match="line 5"):
        next(reader)


def test_a_file_without_lines_holds_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text("")
    assert list(read_traces(path)) == []
    with TraceWriter(path) as writer:
        assert writer.episode_ids == set()


def test_a_file_that_is_not_there_is_one_error_that_names_it(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=path.name):
            list(read_traces(path))


def test_a_last_line_cut_at_any_byte_never_hides_the_ones_before(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    whole = "".join(line + "\n" for line in lines_of(TRACES[:2])).encode()
    last = lines_of(TRACES[2:3])[0].encode()
    for cut in [*range(0, len(last), 37), len(last) - 1, len(last)]:
        path.write_bytes(whole + last[:cut])
        complete = 3 if cut == len(last) else 2
        assert list(read_traces(path)) == TRACES[:complete]
        with TraceWriter(path) as writer:
            assert writer.episode_ids == {trace.episode_id for trace in TRACES[:complete]}
            writer.append(TRACES[3])
        assert list(read_traces(path)) == [*TRACES[:complete], TRACES[3]]


def test_a_reopened_file_knows_its_episodes_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    with TraceWriter(path) as writer:
        writer.append(TRACES[0])
    with TraceWriter(path) as writer:
        assert writer.episode_ids == {TRACES[0].episode_id}
        writer.append(TRACES[1])
        assert writer.episode_ids == {trace.episode_id for trace in TRACES[:2]}
    assert list(read_traces(path)) == TRACES[:2]


def test_reopening_a_file_with_a_bad_line_in_the_middle_keeps_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    first, second, *_ = lines_of(TRACES)
    data = f"{first}\nbroken\n{second}\n".encode() + b'{"half'
    path.write_bytes(data)
    with pytest.raises(TraceError, match="line 2"):
        TraceWriter(path)
    assert path.read_bytes() == data


def test_text_of_any_script_survives_both_ways(tmp_path: Path) -> None:
    """A file of someone else may hold raw U+2028, which str.splitlines would cut."""
    trace = Trace.from_dict(TRACES[0].to_dict())
    trace.threads[0].task = "line\u2028separator \x85 naïve 海豹 \ud83d"
    trace.meta = {"note": "\x1c\x1d\x1e\x0b\x0c"}
    path = tmp_path / "traces.jsonl"
    with TraceWriter(path) as writer:
        writer.append(trace)
    assert list(read_traces(path)) == [trace]
    trace.threads[0].task = "line\u2028separator \x85 naïve 海豹"
    path.write_text(json.dumps(trace.to_dict(), ensure_ascii=False) + "\n", encoding="utf-8")
    assert list(read_traces(path)) == [trace]
    with TraceWriter(path) as writer:
        assert writer.episode_ids == {trace.episode_id}


def test_a_failed_whole_file_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    write_traces(path, TRACES[:2])
    broken = Trace.from_dict(TRACES[2].to_dict())
    broken.meta = {"value": object()}
    with pytest.raises(TypeError):
        write_traces(path, [TRACES[3], broken])
    assert list(read_traces(path)) == TRACES[:2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["traces.jsonl"]


def test_a_trace_that_json_cannot_hold_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    with TraceWriter(path) as writer:
        writer.append(TRACES[0])
        broken = Trace.from_dict(TRACES[2].to_dict())
        broken.reward = float("nan")
        with pytest.raises(ValueError):
            writer.append(broken)
        writer.append(TRACES[1])
    assert list(read_traces(path)) == TRACES[:2]


LOOP = """
import sys
from octopus_trl.trace import Trace, ThreadRecord, Segment
from octopus_trl.trace_files import TraceWriter
with TraceWriter(sys.argv[1]) as writer:
    count = len(writer.episode_ids)
    while True:
        segment = Segment(0, 0, None, "prompt", list(range(4000)))
        threads = [ThreadRecord(0, None, head=0)]
        writer.append(Trace(f"episode-{count}", "p", threads=threads, segments=[segment]))
        count += 1
        print(count, flush=True)
"""


def test_a_killed_writer_leaves_whole_lines_and_the_next_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    total = 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        confirmed = int(child.stdout.readline())
        time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read().split()
        child.wait()
        child.stdout.close()
        confirmed = int(rest[-1]) if rest else confirmed
        found = [trace.episode_id for trace in read_traces(path)]
        assert found == [f"episode-{index}" for index in range(len(found))]
        assert len(found) >= confirmed > total
        total = len(found)
