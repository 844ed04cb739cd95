"""Train a language model that works as many threads over one pool of KV pages.

Public names load on first use, so that reading traces or running agent code imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octopus_trl.agent.config import RolloutConfig
    from octopus_trl.agent.rollout import EpisodeRunner
    from octopus_trl.engine import Cursor, Engine
    from octopus_trl.models import prepare_model
    from octopus_trl.protocols import SamplingParams
    from octopus_trl.trace import Trace, TraceError
    from octopus_trl.train.config import OctopusGRPOConfig
    from octopus_trl.train.packing import score_traces
    from octopus_trl.train.trainer import OctopusGRPOTrainer

__version__ = "0.1.0"

_HOMES = {
    "Cursor": "octopus_trl.engine",
    "Engine": "octopus_trl.engine",
    "EpisodeRunner": "octopus_trl.agent.rollout",
    "OctopusGRPOConfig": "octopus_trl.train.config",
    "OctopusGRPOTrainer": "octopus_trl.train.trainer",
    "RolloutConfig": "octopus_trl.agent.config",
    "SamplingParams": "octopus_trl.protocols",
    "Trace": "octopus_trl.trace",
    "TraceError": "octopus_trl.trace",
    "prepare_model": "octopus_trl.models",
    "score_traces": "octopus_trl.train.packing",
}

__all__ = [
    "Cursor",
    "Engine",
    "EpisodeRunner",
    "OctopusGRPOConfig",
    "OctopusGRPOTrainer",
    "RolloutConfig",
    "SamplingParams",
    "Trace",
    "TraceError",
    "prepare_model",
    "score_traces",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home module and keep it.

    Raises:
        AttributeError: `name` is not public.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
