"""Each system's episodes on a real engine: the record is what the packed pass and the brute force
compute, and training on it moves weights.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from octopus_trl import Engine, EpisodeRunner, Trace, prepare_model, score_traces
from octopus_trl.agent.config import RolloutConfig
from octopus_trl.engine import scheduler
from octopus_trl.maths.objective import rollout_training_kl
from octopus_trl.protocols import SamplingParams
from tests import tolerances
from tests.agent.fakes import ListCorpus, Seeded, byte_tokenizer, xml_call
from tests.agent.test_episode import commit, fork, read, wait
from tests.oracles import brute_logps, spell_out
from tests.tiny import tiny_hybrid

TOKENIZER = byte_tokenizer()
CORPUS = ListCorpus(a="alpha is 17", b="beta is 4", long="word " * 80)
TREE = {
    0: [fork("a") + fork("b"), "hm", read(2), wait(1, 2), read(2) + read(1), commit("21")],
    1: [xml_call("open", docid="a"), commit("17")],
    2: ["hm", read(1), commit("4")],
}
ALONE = {0: [xml_call("open", docid="long"), "alpha is 17", commit("17")]}
SYSTEMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mount": (TREE, {}),
    "unshifted": (TREE, {"position": "unshifted"}),
    "rerotate": (TREE, {"position": "rerotate"}),
    "reencode": (TREE, {"position": "reencode"}),
    "splice": (TREE, {"exchange": "splice"}),
    "splice-rerotate": (TREE, {"exchange": "splice", "position": "rerotate"}),
    "transcript": (TREE, {"exchange": "transcript"}),
    "summary": (TREE, {"exchange": "summary"}),
    "flat": (ALONE, {"agent": "flat"}),
    "compact": (ALONE, {"agent": "compact", "window": 1000, "reserve_tokens": 400}),
}


class SpokenEngine:
    """The real engine, with a script's words for its draws."""

    def __init__(self, real: Engine, script: Seeded) -> None:
        self.real, self._script = real, script
        self._said: dict[int, Sequence[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def submit(
        self, cursor: Any, tokens: Any, sampling: SamplingParams, *, until: Collection[int]
    ) -> int:
        assert sampling.seed is not None
        self._said[sampling.seed] = self._script(lambda: list(tokens), sampling)
        return self.real.submit(cursor, tokens, sampling, until=until)

    def step(self) -> list[Any]:
        with mock.patch.object(scheduler, "draw", self._draw):
            return self.real.step()

    def _draw(self, wanted: Any, logits_of: Any, *, width: int) -> list[tuple[int, float]]:
        pad = [wanted[0].hidden] * (width - len(wanted))
        logits = logits_of(torch.stack([*(row.hidden for row in wanted), *pad]))
        logps = torch.log_softmax(logits, dim=-1)
        words = [self._said[row.seed][row.index] for row in wanted]
        return [(word, logps[at, word].item()) for at, word in enumerate(words)]


def models() -> tuple[Any, Any]:
    stock = tiny_hybrid(0, vocab_size=len(TOKENIZER))
    return stock, prepare_model(copy.deepcopy(stock))


def play(model: Any, name: str) -> Trace:
    turns, settings = SYSTEMS[name]
    engine = Engine(model, page_size=16, num_pages=1600, num_states=64)
    config = RolloutConfig(
        **{"system_prompt": "go", "compact_tools": True, "tool_workers": 0, **settings}
    )
    runner = EpisodeRunner(
        SpokenEngine(engine, Seeded(TOKENIZER, turns)), TOKENIZER, CORPUS, config
    )
    (trace,) = runner.run([{"id": "q", "question": "Which?"}])
    engine.check_integrity()
    assert engine.stats()["cursors"] == 0
    return trace.check(vocab_size=len(TOKENIZER))


def drawn(trace: Trace, scores: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Give the log-probabilities of all sampled tokens: as scored, and as drawn."""
    actions = [segment for segment in trace.segments if segment.kind == "action"]
    scored = torch.cat([scores[segment.id] for segment in actions])
    return scored, torch.tensor([logp for segment in actions for logp in segment.logps or ()])


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_was_sampled_is_what_training_scores(name: str) -> None:
    stock, ours = models()
    trace = play(ours, name)
    assert trace.meta["result"] in ("21", "17")
    roots = sum(segment.parent is None for segment in trace.segments)
    assert roots == {"summary": 3, "compact": 2}.get(name, 1)
    assert any(segment.mounts for segment in trace.segments) == (
        trace.exchange in ("mount", "splice") and (len(trace.threads) > 1)
    )
    [scores] = score_traces(ours, [trace])
    scored, logps = drawn(trace, scores)
    mean, largest = rollout_training_kl(scored.detach(), rollout_logps=logps)
    assert float(mean) <= 1e-8
    assert float(largest) <= tolerances.LOGP
    with torch.no_grad():
        if trace.position == "reencode":
            spelled = spell_out(trace)
            exact = brute_logps(stock, spelled)
            brute, _ = drawn(trace, [exact[index] for index in spelled.where])
        else:
            brute, _ = drawn(trace, brute_logps(stock, trace))
    assert (scored - brute).abs().max() <= tolerances.LOGP
    (-scored.mean()).backward()
    moved = [p.grad.abs().max() for p in ours.parameters() if p.grad is not None]
    assert moved
    assert all(torch.isfinite(each) for each in moved)
    assert max(moved) > 0
