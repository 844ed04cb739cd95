"""Rows with tiles count as what they take, and each layout names files that exist."""

from __future__ import annotations

from typing import Any

import pytest

from octopus_trl import prepare_model
from octopus_trl.train.footprint import Footprint
from octopus_trl.train.plan import Episode, parse_layout
from tests.tiny import tiny_dense, tiny_dense_moe, tiny_hybrid, tiny_hybrid_moe
from tests.train.test_plan import ROOT, WIDE, plan_of


def test_a_tile_longer_than_the_row_counts_as_the_row() -> None:
    model = prepare_model(tiny_dense(0, **WIDE), mount_layers=[3])
    modes: dict[str, Any] = {"autocast": False, "checkpointing": True}
    whole = Footprint.of(model, **modes).row_bytes(50_000)
    fits = Footprint.of(model, **modes, tile_tokens=50_000).row_bytes(50_000)
    assert Footprint.of(model, **modes, tile_tokens=10**9).row_bytes(50_000) == fits
    assert whole <= fits <= 1.5 * whole


@pytest.mark.parametrize("build_tiny", [tiny_hybrid, tiny_dense_moe, tiny_hybrid_moe])
@pytest.mark.parametrize("tile", [1, 64, 65, 5_000, 10**9])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 4_096, 131_072])
def test_the_longest_row_with_tiles_is_the_last_that_a_memory_holds(
    build_tiny: Any, tile: int, tokens: int
) -> None:
    model = prepare_model(build_tiny(), mount_layers=[3])
    found = Footprint.of(model, autocast=True, checkpointing=True, tile_tokens=tile)
    room = found.row_bytes(tokens)
    longest = found.longest_row(room)
    assert longest >= tokens
    assert found.row_bytes(longest) <= room < found.row_bytes(longest + 1)


@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("gpus", ["1", "3", "8", "2x8", "3x1"])
def test_every_layout_names_a_launch_file_that_ships(gpus: str, zero: int | None) -> None:
    layout = parse_layout(gpus, zero)
    assert (ROOT / "accelerate_configs" / f"{layout.launch_file}.yaml").is_file()
    notes = " ".join(
        plan_of(prepare_model(tiny_hybrid()), gpus, layout.zero).warnings(Episode(1, 1))
    )
    assert ("is for one machine: add --num_machines" in notes) == (
        "x" in gpus and not layout.launch_file.startswith("multinode")
    )
