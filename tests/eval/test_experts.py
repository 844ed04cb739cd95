"""Expert episodes: true, honest, written as the template would, the same bytes every time."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octopus_trl.agent.calls import read_xml
from octopus_trl.agent.rollout import EpisodeRunner, RolloutConfig
from octopus_trl.agent.systems import POSITIONS
from octopus_trl.errors import ClosedCursor, ConfigError, TraceError
from octopus_trl.eval.scripted import Block, ScriptedEngine
from octopus_trl.eval.seal_join import ARMS, World, WorldConfig
from octopus_trl.eval.seal_join_backend import SealJoinBackend, load_world
from octopus_trl.eval.seal_join_experts import UNKNOWN, ExpertOptions, ExpertPolicy
from octopus_trl.eval.seal_join_studio import (
    WORLD_ROLLOUT,
    ExpertStudio,
    make_shards,
    read_shards,
)
from octopus_trl.eval.seal_join_tokenizer import build_tokenizer
from octopus_trl.protocols import SamplingParams
from octopus_trl.trace import Trace

TOKENIZER: Any = build_tokenizer()
PLAIN = ExpertOptions(empty_search=0, shuffled=0)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> SealJoinBackend:
    config = WorldConfig(num_adjectives=16, num_nouns=16)
    return load_world(World(config).write(tmp_path_factory.mktemp("world")), snippet_tokens=0)


def studio(backend: SealJoinBackend, **changes: Any) -> ExpertStudio:
    options = changes.pop("options", None)
    config = RolloutConfig(**{**WORLD_ROLLOUT, "tool_workers": 0, **changes})
    return ExpertStudio(backend, TOKENIZER, config=config, options=options)


def texts(trace: Trace, thread: int, kind: str = "action") -> list[str]:
    return [
        TOKENIZER.decode(segment.tokens)
        for segment in trace.segments
        if segment.thread == thread and segment.kind == kind
    ]


def calls(trace: Trace, thread: int) -> list[str]:
    return [call.name for text in texts(trace, thread) for call in read_xml(text)]


@pytest.mark.parametrize("branches", [1, 2, 3, 4])
@pytest.mark.parametrize("arm", ARMS)
def test_the_ceiling_with_mounts_is_one(backend: SealJoinBackend, arm: str, branches: int) -> None:
    maker = studio(backend)
    for index in range(20):
        row = backend.world.question("test", arm, branches, index)
        trace = maker.trace(row, seed=index).check(vocab_size=len(TOKENIZER))
        assert trace.reward == 1.0, trace.meta
        assert {thread.status for thread in trace.threads} == {"committed"}
        assert len(trace.threads) == branches + 1
        assert not trace.truncated


@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.parametrize("arm", ARMS)
def test_the_ceiling_without_reads_is_zero(
    backend: SealJoinBackend, arm: str, branches: int
) -> None:
    maker = studio(backend, disabled_tools=("read_thread",))
    for index in range(20):
        trace = maker.trace(backend.world.question("test", arm, branches, index))
        assert trace.reward == 0.0
        assert trace.meta["result"] == UNKNOWN
        assert all(segment.mounts == [] for segment in trace.segments)


def test_no_branch_repeats_a_seal_and_the_root_never_sees_one_in_its_own_text(
    backend: SealJoinBackend,
) -> None:
    for index in range(20):
        row = backend.world.question("train", "late", 3, index)
        trace = studio(backend).trace(row, seed=index)
        for seal in row["answers"][0].split():
            assert not any(seal in t for thread in (1, 2, 3) for t in texts(trace, thread))
            assert not any(seal in text for text in texts(trace, 0, "tool"))
            assert seal in texts(trace, 0)[-1]


def test_the_plain_flow_is_the_one_of_the_design(backend: SealJoinBackend) -> None:
    world = backend.world
    row = next(
        row
        for row in world.questions("train", 200, arms=("late",), branches=(2,))
        if all(world.first_edition[world.steward[e]] == 2 for e in row["entities"])
    )
    trace = studio(backend, options=PLAIN).trace(row)
    assert calls(trace, 0) == ["fork", "fork", "wait_threads", "read_thread", "read_thread"] + [
        "commit"
    ]
    assert len(texts(trace, 0)) == 4
    for thread in (1, 2):
        assert calls(trace, thread) == ["search", "open", "search", "open", "commit"]
    truth = world.truth(row)
    thought = texts(trace, 0)[-1].partition("\n</think>")[0]
    assert thought.startswith(f"the chair is {truth.guilds[truth.chair]} and names {truth.named}.")


def test_a_withdrawn_edition_is_left_by_rewind_or_opened_over(backend: SealJoinBackend) -> None:
    world = backend.world
    rows = [
        row
        for row in world.questions("train", 400, branches=(1,))
        if world.first_edition[world.steward[row["entities"][0]]] == 1
    ][:20]
    assert rows
    for share, extra in ((1.0, ["rewind", "open"]), (0.0, ["open"])):
        options = dataclasses.replace(PLAIN, rewind=share)
        for row in rows:
            trace = studio(backend, options=options).trace(row).check()
            expected = ["search", "open", "search", "open", *extra, "commit"]
            assert calls(trace, 1) == expected
            assert trace.reward == 1.0
            mounted = {mount for segment in trace.segments for mount in segment.mounts}
            read = "".join(TOKENIZER.decode(trace.segments[i].tokens) for i in sorted(mounted))
            assert ("is withdrawn" in read) == (share == 0.0)


def test_shares_of_detours_are_those_asked_for(backend: SealJoinBackend) -> None:
    maker, rng = studio(backend), np.random.default_rng(0)
    seen: Counter[str] = Counter()
    branches = 0
    for _ in range(150):
        trace = maker.draw(rng)
        assert trace.reward == 1.0
        for thread in trace.threads[1:]:
            branches += 1
            seen["empty"] += len(set(calls(trace, thread.id))) and texts(trace, thread.id)[0].count(
                "\ntask\n"
            )
            seen["stale"] += calls(trace, thread.id).count("open") == 3
    assert 0.01 < seen["empty"] / branches < 0.12
    assert 0.08 < seen["stale"] / branches < 0.25


def test_experts_write_what_the_template_would_render(backend: SealJoinBackend) -> None:
    rng = np.random.default_rng(1)
    maker = studio(backend)
    for _ in range(10):
        trace = maker.draw(rng)
        for thread in trace.threads:
            ids, _ = trace.linearize(thread.head if thread.head is not None else 0)
            text = TOKENIZER.decode(ids)
            messages = parse_chat(text)
            # An unanswered last turn ends without the line end that the template adds.
            rendered = TOKENIZER.apply_chat_template(messages, tokenize=False).removesuffix("\n")
            assert text == rendered


def parse_chat(text: str) -> list[dict[str, Any]]:
    """Read a rendered chat back into messages, one block at a time."""
    messages: list[dict[str, Any]] = []
    for block in text.split("<|im_start|>")[1:]:
        role, _, body = block.removesuffix("\n").removesuffix("<|im_end|>").partition("\n")
        if role != "assistant":
            results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", body, re.DOTALL)
            if results:
                messages += [{"role": "tool", "content": result} for result in results]
            else:
                messages.append({"role": role, "content": body})
            continue
        thought, _, rest = body.removeprefix("<think>\n").partition("\n</think>\n\n")
        made = [{"name": call.name, "arguments": call.arguments} for call in read_xml(rest)]
        messages.append(
            {"role": role, "content": "", "reasoning_content": thought, "tool_calls": made}
        )
    return messages


def test_one_seed_gives_one_trace(backend: SealJoinBackend) -> None:
    first = [studio(backend).draw(np.random.default_rng(5)).to_dict() for _ in range(2)]
    assert first[0] == first[1]
    assert studio(backend).draw(np.random.default_rng(6)).to_dict() != first[0]


def test_episodes_of_many_rows_share_one_engine(backend: SealJoinBackend) -> None:
    rows = backend.world.questions("test", 12)
    scripts = {row["question"]: ExpertPolicy(backend.world, row) for row in rows}

    def script_of(prompt: str) -> ExpertPolicy:
        return next(script for question, script in scripts.items() if question in prompt)

    engine = ScriptedEngine(TOKENIZER, script_of)
    config = RolloutConfig(**WORLD_ROLLOUT, tool_workers=2)
    traces = EpisodeRunner(engine, TOKENIZER, backend, config).run(rows, group_size=2)
    assert len(traces) == 24
    for trace, row in zip(traces, [row for row in rows for _ in range(2)], strict=True):
        assert trace.check().meta["result"] in row["answers"]
    stats = engine.stats()
    assert stats["turns"] == sum(s.kind == "action" for t in traces for s in t.segments)
    fed = sum(len(s.tokens) for t in traces for s in t.segments if s.kind != "action")
    assert stats["tokens_fed"] == fed


@pytest.mark.parametrize("position", POSITIONS)
def test_engine_positions_are_those_of_the_trace(backend: SealJoinBackend, position: str) -> None:
    seen: list[int] = []

    class Watched(ScriptedEngine):
        def submit(self, cursor: Any, *args: Any, **kwargs: Any) -> int:
            ticket = super().submit(cursor, *args, **kwargs)
            seen.append(cursor.position)
            return ticket

    row = backend.world.question("train", "late", 2, 3)
    engine = Watched(TOKENIZER, lambda _: ExpertPolicy(backend.world, row, options=PLAIN))
    config = RolloutConfig(**WORLD_ROLLOUT, tool_workers=0, position=position)
    (trace,) = EpisodeRunner(engine, TOKENIZER, backend, config).run([row])
    trace.check()
    assert any(segment.mounts for segment in trace.segments)
    starts = [segment.start for segment in trace.segments if segment.kind == "action"]
    assert sorted(seen) == sorted(starts)


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_shares_outside_zero_and_one_are_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="share"):
        ExpertOptions(empty_search=share)


class Echo:
    """Says how many blocks it has seen."""

    def turn(self, blocks: Sequence[Block]) -> str:
        return f"turn {len(blocks)}"


def test_scripted_cursors_fork_rewind_and_close() -> None:
    engine = ScriptedEngine(TOKENIZER, lambda _: Echo())
    sampling = SamplingParams()
    root = engine.open(TOKENIZER.encode("find the seal"))
    child = engine.fork(root)
    ticket = engine.submit(child, TOKENIZER.encode(" of"), sampling, until={0})
    (finished,) = engine.step()
    assert finished.ticket == ticket
    assert TOKENIZER.decode(finished.tokens) == "turn 2<|im_end|>"
    assert finished.logps == [0.0] * len(finished.tokens)
    assert not engine.has_work
    assert (root.num_tokens, child.num_tokens) == (3, 4 + len(finished.tokens))
    engine.rewind(child, 4)
    assert [block.text for block in child.blocks] == ["find the seal", " of"]
    with pytest.raises(ConfigError, match="end of a block"):
        engine.rewind(child, 2)
    cancelled = engine.submit(child, [], sampling, until={0})
    assert engine.cancel(cancelled) == ([], [])
    assert engine.step() == []
    rules: list[dict[str, Any]] = [{"position": "beside"}, {"exchange": "summary"}]
    for rule in rules:
        with pytest.raises(ConfigError, match="must be one of"):
            engine.mount(root, child, **rule)
    engine.close(child)
    with pytest.raises(ClosedCursor):
        engine.extend(child, [1])


def test_shards_are_the_same_bytes_and_survive_an_interruption(
    tmp_path: Path, backend: SealJoinBackend
) -> None:
    world = backend.base.corpus.path.parent

    def make(name: str, **extra: Any) -> list[Path]:
        return make_shards(
            tmp_path / name, world, count=25, per_shard=10, processes=1, seed=3, **extra
        )

    whole = make("a")
    assert [path.name for path in whole] == [
        f"expert-3-{index:04d}-{size}.jsonl.gz" for index, size in enumerate((10, 10, 5))
    ]
    again = make("b")
    again[1].unlink()
    before = again[0].stat().st_mtime_ns
    make("b")
    assert again[0].stat().st_mtime_ns == before
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in again]
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [p.name for p in whole]
    traces = list(read_shards(whole))
    assert len(traces) == 25
    assert all(trace.check().reward == 1.0 for trace in traces)
    late = list(read_shards(make("c", arms=("late",), branches=(2,))))
    assert {(trace.meta["arm"], trace.meta["branches"]) for trace in late} == {("late", 2)}
    whole[0].write_bytes(whole[0].read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"expert-3-0000.*broken shard"):
        list(read_shards(whole))


@pytest.mark.slow
def test_processes_do_not_change_a_shard(tmp_path: Path, backend: SealJoinBackend) -> None:
    world = backend.base.corpus.path.parent
    made = [
        make_shards(tmp_path / str(n), world, count=8, per_shard=4, processes=n) for n in (1, 2)
    ]
    assert [p.read_bytes() for p in made[0]] == [p.read_bytes() for p in made[1]]


def test_ctrl_c_ends_all_processes_without_a_traceback(
    tmp_path: Path, backend: SealJoinBackend
) -> None:
    code = (
        "import sys\n"
        "from octopus_trl.eval.seal_join_studio import make_shards\n"
        "from octopus_trl.report.ending import ending\n"
        "with ending(stopped='run it again'):\n"
        "    make_shards(sys.argv[1], sys.argv[2], count=10**6, per_shard=10**5, processes=2)\n"
    )
    world = backend.base.corpus.path.parent
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(world)],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while not any(tmp_path.iterdir()) and run.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    _, said = run.communicate(timeout=120)
    assert (run.returncode, said) == (130, b"stopped; run it again\n")


@pytest.mark.parametrize("settings", [{"count": 0}, {"count": 3, "per_shard": 0}])
def test_shards_of_nothing_are_refused(tmp_path: Path, settings: dict) -> None:
    with pytest.raises(ConfigError):
        make_shards(tmp_path, "unused", **settings)
