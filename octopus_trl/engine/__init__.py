"""Generation: cursors over one pool of pages, states and prompts; turns over time."""

from octopus_trl.engine.cursor import Cursor
from octopus_trl.engine.engine import Engine
from octopus_trl.protocols import SamplingParams

__all__ = ["Cursor", "Engine", "SamplingParams"]
