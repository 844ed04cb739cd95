"""One rank that fails ends every rank, and each says which rank it was and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from octopus_trl.train.ranks import EXIT_CODE
from tests.train.failing_worker import CASES, CAUSE
from tests.train.forks import log_of

SAYS = {
    "reward": "rank 1 failed while judging episodes: Broken: ",
    "drawing": "rank 1 failed while drawing episodes: Broken: ",
}


@pytest.mark.timeout(900)
def test_all_ranks_end_with_the_number_and_the_reason_of_the_one_that_failed(
    run_scene: Callable[..., None], tmp_path: Path
) -> None:
    run_scene("failing", tmp_path)
    ends = json.loads((tmp_path / "ends.json").read_text())
    assert set(ends) == set(CASES)
    for case, hangs in CASES.items():
        # Nobody had to be ended from outside, which would be a negative code.
        assert ends[case] == [EXIT_CODE if hangs else 1, 1], case
        first, second = (log_of(tmp_path / case, rank) for rank in (0, 1))
        assert SAYS.get(case, "rank 1 failed: Broken: ") + CAUSE in first, case
        assert f"Broken: {CAUSE}" in second, case
        assert "RankFailed" not in second, case
