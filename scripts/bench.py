"""Measure ours against the alternative on the same work; one JSON line a figure (DESIGN §8).

    python scripts/bench.py                                    every case on the tiny model
    python scripts/bench.py fork mount --keep                  two cases, added to data/bench/
    python scripts/bench.py --model qwen3.5-4b --budget 300    on one H200, five minutes at most

Each case checks its result before it measures. Runs on whatever device is there; figures of a CPU
say nothing of a GPU, so the line names the hardware. A case that does not fit the budget, or that
failed, says so in a line of its own. To add one: a module in `scripts/bench_cases/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # octopus_trl of this checkout, whatever is installed
    from bench_cases.command import main  # type: ignore[import-not-found]

    sys.exit(main())
