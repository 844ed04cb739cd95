"""Episodes of the policy that ships, and how far training is from their draws, by kind of token."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octopus_trl import Engine, EpisodeRunner
from octopus_trl.agent.config import RolloutConfig
from octopus_trl.eval.policy_settings import rollout_settings
from octopus_trl.eval.seal_join_backend import load_world
from octopus_trl.maths.objective import rollout_training_kl
from octopus_trl.models import prepare_model
from octopus_trl.train.packing import score_traces
from octopus_trl.train.rows import WHERE, Tree, build_row

DATA = Path(__file__).parents[2] / "data"
FOLDER = DATA / "policy" / "tiny-hybrid"


def shipped_policy(device: str, dtype: torch.dtype) -> Any:
    """Load it and prepare it."""
    policy = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype)
    return prepare_model(policy.to(device)).eval()


def step_zero_kl(policy: Any, episodes: int, **options: Any) -> dict[str, tuple[float, float, int]]:
    """Mean of e^d - 1 - d and largest |d| over the owned tokens of each kind, and how many.

    Args:
        options: of the engine.
    """
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    world = load_world(DATA / "seal_join", snippet_tokens=0)
    questions = world.world.questions("test", episodes, branches=(1, 2, 3))
    config = RolloutConfig(**rollout_settings(world=True, recipe=None, given={"temperature": 1.0}))
    engine = Engine(policy, page_size=16, **options)
    traces = EpisodeRunner(engine, tokenizer, world, config).run(questions, seed=5)
    engine.check_integrity()
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in WHERE}
    for trace in traces:
        with torch.no_grad():
            [scores] = score_traces(policy, [copy.deepcopy(trace)])
        row = build_row([Tree(trace, 1.0)], mounts="live")
        actions = [segment.id for segment in trace.segments if segment.kind == "action"]
        train = torch.cat([scores[index] for index in actions]).cpu()
        rollout = torch.from_numpy(row.sampling_logps).float()
        assert len(train) == len(rollout) == len(row.where)
        for kind, name in enumerate(WHERE):
            chosen = torch.from_numpy(np.flatnonzero(row.where == kind))
            if len(chosen):
                kl, largest = rollout_training_kl(train[chosen], rollout_logps=rollout[chosen])
                found[name].append((float(kl), float(largest), len(chosen)))
    return {name: _pooled(parts) for name, parts in found.items()}


def _pooled(parts: list[tuple[float, float, int]]) -> tuple[float, float, int]:
    count = sum(number for *_, number in parts)
    if not count:
        return math.nan, math.nan, 0
    mean = sum(kl * number for kl, _, number in parts) / count
    return mean, max(largest for _, largest, _ in parts), count
