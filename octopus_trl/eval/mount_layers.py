"""Which attention layers a mount must reach, scored by what the answer's likelihood gains.

A dense model needs a list of layers: mounting on all of them would hand the reader its sibling's
goal with its findings. Retrieval sits in few layers. A set of layers is scored by the share of the
answer's NLL reduction that it restores, where the full text restores all of it:

    share(L) = Σ (nll_none − nll_L) / Σ (nll_none − nll_full)      over probes

(paper: "retained answer information", there for one fixed set).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.eval.intervals import Estimate, ratio
from octopus_trl.eval.probes import Probe
from octopus_trl.eval.readings import FULL_TEXT, NONE, question_episode
from octopus_trl.trace import Trace

Layers = tuple[int, ...]
AnswerNll = Callable[[Sequence[Trace], Layers], Sequence[float]]
"""Gives the NLL of the last segment of each trace, nats, with mounts on these layers."""

METHODS = ("greedy", "top")
MIN_GAIN = 0.005  # share that one more layer must restore
MIN_HELP = 0.1  # nats that the full text must save an answer; a share of less is noise


@dataclass(frozen=True, slots=True)
class Restored:
    """What mounts on some layers restore.

    Attributes:
        share: of the NLL reduction that the full text gives.
        nll: of the answer, mean over probes, nats.
    """

    layers: Layers
    share: Estimate
    nll: float

    @property
    def value(self) -> float:
        """The share itself."""
        assert self.share.value is not None
        return self.share.value

    def as_json(self) -> dict[str, Any]:
        """Give it as a JSON object."""
        return {"layers": list(self.layers), "nll": self.nll, **self.share.as_json()}


class LayerStudy:
    """Scores sets of layers on probes; each set once, kept in `scores`.

    Args:
        nll: scores episodes with a model; `candidates` are layers that it may mount on.
        reading: how the sibling is read, one of `readings.READINGS` with mounts.
        scores: where scores are kept and looked up, by reading and layers.
    Raises:
        ConfigError: no candidate, or the full text saves less than `MIN_HELP` on these probes.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        nll: AnswerNll,
        candidates: Sequence[int],
        *,
        reading: str = "mount",
        scores: MutableMapping[str, list[float]] | None = None,
    ) -> None:
        if not candidates:
            raise ConfigError("no attention layer to choose from: give at least one")
        self.probes, self.candidates = list(probes), tuple(sorted(set(candidates)))
        self._nll, self._reading = nll, reading
        self._scores = {} if scores is None else scores
        self.none = self._answers(NONE, ())
        self.full = self._answers(FULL_TEXT, ())
        if mean(self.none) - mean(self.full) < MIN_HELP:
            raise ConfigError(
                f"the full text hardly makes the answers likelier ({mean(self.full):.2f} nats, "
                f"{mean(self.none):.2f} without it, must save {MIN_HELP}): this model cannot use "
                "these probes; give a trained model, or probes that it can answer from the text"
            )

    def restored(self, layers: Sequence[int]) -> Restored:
        """Score mounts on some of the candidates."""
        chosen = tuple(sorted(layers))
        nll = self._answers(self._reading, chosen)
        gained = [before - after for before, after in zip(self.none, nll, strict=True)]
        most = [before - after for before, after in zip(self.none, self.full, strict=True)]
        return Restored(chosen, ratio(gained, most), mean(nll))

    def rank(self) -> list[Restored]:
        """Score each candidate alone; best first, the lower layer first where two are equal."""
        alone = [self.restored((layer,)) for layer in self.candidates]
        return sorted(alone, key=lambda each: (-each.value, each.layers))

    def _answers(self, reading: str, layers: Layers) -> list[float]:
        key = f"{reading}:{','.join(map(str, layers))}"
        if key not in self._scores:
            traces = [question_episode(probe, reading) for probe in self.probes]
            self._scores[key] = list(self._nll(traces, layers or self.candidates))
        return self._scores[key]


def grow(
    study: LayerStudy, *, method: str = "greedy", max_layers: int = 4, target: float = 0.95
) -> list[Restored]:
    """Add layers to an empty set, and give every set on the way; the last one is the choice.

    "greedy" adds the layer with which the set restores most; "top" adds in the order of what each
    restores alone. It ends where `target` is restored, at `max_layers`, or where the next layer
    would add less than `MIN_GAIN`.

    Raises:
        ConfigError: a setting is out of range, or no single layer restores anything.
    """
    check_growth(method, max_layers, target)
    ranked = study.rank()
    if ranked[0].value < MIN_GAIN:
        raise ConfigError(
            f"no single layer restores anything (at best layer {ranked[0].layers[0]}, "
            f"{ranked[0].value:.1%}): the answer needs several layers at once, or none of "
            f"{list(study.candidates)} retrieves"
        )
    path = [ranked[0]]
    while len(path) < min(max_layers, len(study.candidates)) and path[-1].value < target:
        held = path[-1].layers
        if method == "top":
            best = study.restored((*held, ranked[len(path)].layers[0]))
        else:
            left = [layer for layer in study.candidates if layer not in held]
            wider = [study.restored((*held, layer)) for layer in left]
            best = max(wider, key=lambda each: each.value)
        if best.value - path[-1].value < MIN_GAIN:
            break
        path.append(best)
    return path


def check_growth(method: str, max_layers: int, target: float) -> None:
    """Refuse settings of `grow` that have no meaning.

    Raises:
        ConfigError: says the value and the rule.
    """
    if method not in METHODS:
        raise ConfigError(f"method={method!r}: must be one of {', '.join(METHODS)}")
    if max_layers < 1:
        raise ConfigError(f"max_layers={max_layers}: must be at least 1")
    if not 0 < target <= 1:
        raise ConfigError(f"target={target}: must lie in (0, 1], a share of what full text gives")


def most_passes(num_candidates: int, method: str, max_layers: int) -> int:
    """Bound the sets of layers that a study and `grow` score, the two ends and all included.

    >>> most_passes(4, "top", 3), most_passes(4, "greedy", 3)
    (9, 12)
    """
    steps: Iterator[int] = iter(range(1, min(max_layers, num_candidates)))
    grown = sum(num_candidates - held if method == "greedy" else 1 for held in steps)
    return 3 + num_candidates + grown


def mean(values: Sequence[float]) -> float:
    """Give the mean of at least one value."""
    return sum(values) / len(values)
