"""What a warm start is trained on: drills first, then more and more expert episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octopus_trl.errors import ConfigError
from octopus_trl.eval.seal_join_backend import SealJoinBackend
from octopus_trl.eval.seal_join_drills import Drills
from octopus_trl.eval.seal_join_experts import ExpertOptions
from octopus_trl.eval.seal_join_studio import ExpertStudio
from octopus_trl.eval.seal_join_words import SYMBOLS
from octopus_trl.trace import Trace

NUM_BYTES = 256  # the tokenizer's first ids are single bytes, then come words and tags
SOURCES = ("repeat", "own_page", "mounted_pages", "expert", "careless")
CARELESS = ExpertOptions(skip_guild=0.12, keep_withdrawn=0.5, skip_read=0.2, skip_wait=0.1)


class SealJoinMixture:
    """Draws one trace, its kind by the stage that the run has reached.

    Args:
        stages: in order, each with `until` (progress in (0, 1]) and a weight for each source.
    Raises:
        ConfigError: a stage has an unknown source, no weight, or the stages do not end at 1.
    """

    def __init__(
        self, backend: SealJoinBackend, tokenizer: Any, stages: Sequence[Mapping[str, float]]
    ) -> None:
        self._stages = [_check_stage(stage) for stage in stages]
        if not self._stages or self._stages[-1][0] != 1.0:
            raise ConfigError(f"curriculum {list(stages)}: the last stage must have until 1.0")
        symbols = tokenizer.convert_tokens_to_ids(list(SYMBOLS))
        vocab = [*symbols, *range(NUM_BYTES, len(tokenizer))]
        self._drills = Drills(backend.world, tokenizer, vocab=vocab)
        self._studios = {
            "expert": ExpertStudio(backend, tokenizer),
            "careless": ExpertStudio(backend, tokenizer, options=CARELESS),
        }

    def __call__(self, rng: np.random.Generator, progress: float) -> Trace:
        weights = next(weights for until, weights in self._stages if progress < until)
        source = SOURCES[rng.choice(len(SOURCES), p=weights)]
        if source in self._studios:
            trace = self._studios[source].draw(rng)
            trace.meta["source"] = source
            return trace
        drill: Trace = getattr(self._drills, source)(rng)
        return drill


def _check_stage(stage: Mapping[str, float]) -> tuple[float, np.ndarray]:
    unknown = sorted(set(stage) - {"until", *SOURCES})
    weights = np.asarray([float(stage.get(source, 0)) for source in SOURCES])
    if unknown or not 0 < stage.get("until", 0) <= 1 or weights.min() < 0 or weights.sum() <= 0:
        raise ConfigError(
            f"curriculum stage {dict(stage)}: must hold until in (0, 1] and weights >= 0 of "
            f"{SOURCES}, at least one above 0; unknown: {unknown}"
        )
    return float(stage["until"]), weights / weights.sum()
