"""The layers that hold the answer are found, whatever else attends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from octopus_trl import prepare_model
from octopus_trl.errors import ConfigError
from octopus_trl.eval.layer_scores import LayerScores
from octopus_trl.eval.mount_layers import Layers, LayerStudy, grow, most_passes
from octopus_trl.eval.readings import question_episode
from octopus_trl.trace import Trace
from octopus_trl.train.choices import score_last
from tests.eval.planted import ASK, FIRST, HOPS, planted_model, planted_probes
from tests.tiny import tiny_hybrid

Worth = Callable[[Layers], float]


def scorer(model: Any) -> Callable[[Sequence[Trace], Layers], list[float]]:
    def nll(traces: Sequence[Trace], layers: Layers) -> list[float]:
        prepare_model(model, mount_layers=layers)
        return [-sum(logps) for logps, _ in score_last(model, traces)]

    return nll


def made_up(worth: Worth, layers: int = 5, **options: Any) -> LayerStudy:
    """A study of a model that restores `worth` of 10 nats, 2 of which even the full text leaves."""

    def nll(traces: Sequence[Trace], layers: Layers) -> list[float]:
        per_trace = []
        for trace in traces:
            if trace.exchange == "transcript":
                per_trace.append(2.0)
            elif trace.segments[3].mounts:
                per_trace.append(10.0 - 8.0 * worth(layers))
            else:
                per_trace.append(10.0)
        return per_trace

    return LayerStudy(planted_probes(3), nll, range(layers), **options)


@pytest.mark.parametrize("where", [0, 3])
@pytest.mark.parametrize("method", ["greedy", "top"])
def test_the_planted_layer_is_found_and_it_alone(where: int, method: str) -> None:
    model = planted_model({where: ((ASK,), tuple(FIRST))}, layers=4)
    study = LayerStudy(planted_probes(8), scorer(model), range(4))
    ranked = study.rank()
    assert ranked[0].layers == (where,)
    assert ranked[0].value > 0.95
    assert all(abs(each.value) < 0.05 for each in ranked[1:])
    assert [each.layers for each in grow(study, method=method)] == [(where,)]


@pytest.mark.parametrize("method", ["greedy", "top"])
def test_an_answer_in_two_hops_takes_both_layers(method: str) -> None:
    model = planted_model(HOPS)
    study = LayerStudy(planted_probes(8, hops=2), scorer(model), range(6))
    path = grow(study, method=method, target=1.0)
    assert path[-1].layers == tuple(HOPS)
    assert path[-1].value > path[0].value + 0.1
    held_out = LayerStudy(planted_probes(8, seed=1, hops=2), scorer(model), range(6))
    assert held_out.restored(path[-1].layers).value > 0.8


def test_a_random_model_that_cannot_use_the_text_is_refused() -> None:
    model = planted_model({}, layers=3)
    with pytest.raises(ConfigError, match="full text hardly makes the answers likelier"):
        LayerStudy(planted_probes(4), scorer(model), range(3))


def test_a_hybrid_offers_its_attention_layers_and_no_others() -> None:
    """Whether a random model gains by a text is chance, so only probes count with which it does."""
    model = prepare_model(tiny_hybrid(0, layers=8))
    probes = planted_probes(30)
    nll = scorer(model)
    before = nll([question_episode(probe, "none") for probe in probes], (3, 7))
    after = nll([question_episode(probe, "transcript") for probe in probes], (3, 7))
    helped = [p for p, more, less in zip(probes, before, after, strict=True) if more - less > 0.2]
    assert len(helped) > 2
    study = LayerStudy(helped, nll, (3, 7))
    assert sorted(each.layers for each in study.rank()) == [(3,), (7,)]
    with pytest.raises(ConfigError, match="distinct attention layers"):
        LayerStudy(helped, nll, (0, 3)).rank()


def test_a_share_is_measured_between_no_text_and_full_text() -> None:
    study = made_up(lambda layers: 0.25 * len(layers))
    assert study.restored((1,)).value == pytest.approx(0.25)
    assert study.restored((0, 1, 4)).value == pytest.approx(0.75)
    assert study.restored((4, 0, 1)).layers == (0, 1, 4)
    assert study.restored((1,)).nll == pytest.approx(8.0)


def test_greedy_sees_that_two_layers_say_the_same() -> None:
    """1 and 2 restore 0.5 each, and together too; 3 restores 0.3 more than either."""

    def worth(layers: Layers) -> float:
        return 0.5 * bool({1, 2} & set(layers)) + 0.3 * (3 in layers)

    assert grow(made_up(worth), method="greedy")[-1].layers == (1, 3)
    assert grow(made_up(worth), method="top")[-1].layers == (1,)


def test_growing_ends_at_the_target_at_the_most_layers_and_where_nothing_is_gained() -> None:
    study = made_up(lambda layers: min(0.8, 0.2 * len(layers)))
    assert len(grow(study, max_layers=5)) == 4
    assert len(grow(study, max_layers=2)) == 2
    assert len(grow(study, target=0.5, max_layers=5)) == 3
    assert len(grow(made_up(lambda layers: len(layers) / 2, layers=2), max_layers=9)) == 2


def test_no_set_is_scored_twice_and_the_bound_on_passes_holds(tmp_path: Path) -> None:
    calls: list[Layers] = []

    def nll(traces: Sequence[Trace], layers: Layers) -> list[float]:
        calls.append(layers)
        mounted, pasted = bool(traces[0].segments[3].mounts), len(traces[0].segments[3].tokens) > 4
        gained = len(layers) / 20 if mounted else float(pasted)
        return [5.0 - gained] * len(traces)

    probes, path = planted_probes(3), tmp_path / "deep" / "scores.jsonl"

    def study() -> LayerStudy:
        return LayerStudy(probes, nll, range(6), scores=LayerScores(path, {"model": "m"}))

    first = study()
    chosen = [each.layers for each in grow(first, max_layers=4)]
    first.restored(range(6))
    assert len(calls) == len(set(calls)) + 2  # the two ends are asked with every candidate too
    assert len(calls) == most_passes(6, "greedy", 4)
    calls.clear()
    assert [each.layers for each in grow(study(), max_layers=4)] == chosen
    assert calls == []
    # A kill in the middle of a line costs that line.
    text = path.read_text()
    path.write_text(text[: len(text) - 9])
    grow(study(), max_layers=4)
    study().restored(range(6))
    assert len(calls) == 1
    with pytest.raises(ConfigError, match="holds scores of other settings"):
        LayerScores(path, {"model": "another"})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "best"}, "method='best': must be one of greedy, top"),
        ({"max_layers": 0}, "max_layers=0: must be at least 1"),
        ({"target": 0.0}, r"target=0.0: must lie in \(0, 1\]"),
        ({"target": float("nan")}, "target=nan"),
    ],
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        grow(made_up(lambda layers: 0.5), **settings)


def test_a_model_in_which_no_layer_restores_anything_is_refused() -> None:
    with pytest.raises(ConfigError, match="no single layer restores anything"):
        grow(made_up(lambda layers: 0.0))
    with pytest.raises(ConfigError, match="no attention layer"):
        made_up(lambda layers: 0.0, layers=0)
