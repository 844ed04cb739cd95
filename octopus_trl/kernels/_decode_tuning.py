"""Sizes of the decode attention kernel by head dim and rows; scripts/bench_attention.py measures.

A program runs on `warps` warps whatever it works on, so the tiles of a line belong together: eight
warps for a tile of 128, four for one of 64.
"""

from __future__ import annotations

from dataclasses import dataclass

from octopus_trl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernel cuts its work.

    Attributes:
        small, large: rows of a tile (readers times query heads of a KV head) for few and for many
            readers, 16, 32, 64 or 128. From 64 on Hopper's warpgroup products are used.
        small_block, large_block: slots of a step of the inner loop, for each tile.
        small_stages, large_stages: steps whose loads are in flight or in use, for each tile.
        warps: of a program.
        programs: on each multiprocessor, as many as registers and shared memory hold.
        merge_block, merge_warps: partials that the merge reads at once, and its warps.
        share: part of a program's work that an item is (`engine/work_cut.py`).
    """

    small: int
    small_block: int
    small_stages: int
    large: int
    large_block: int
    large_stages: int
    warps: int
    programs: int
    merge_block: int = 16
    merge_warps: int = 4
    share: float = 0.5

    @classmethod
    def of(cls, head_dim: int, rows: int) -> Tuning:
        """Give the line for a head dim and a pass of at most `rows` rows: what is planned for a
        pass and what runs it ask with the same number, the rows that its work has room for.

        Raises:
            ConfigError: the head dim is above 256.
        """
        for most_dim, lines in _TABLE.items():
            if head_dim <= most_dim:
                return next(tuning for most, tuning in lines.items() if rows <= most)
        raise ConfigError(
            f"head_dim is {head_dim}, must be at most {max(_TABLE)} for the decode kernel; "
            "OCTOPUS_KERNELS=maths runs the slow reference"
        )

    def readers_per_tile(self, group: int) -> int:
        """Count the readers of a tile where `group` query heads share a KV head.

        Raises:
            ConfigError: one reader alone is more than a tile.
        """
        if group > self.large:
            raise ConfigError(
                f"{group} query heads share a KV head, must be at most {self.large} for the decode "
                "kernel; OCTOPUS_KERNELS=maths runs the slow reference"
            )
        return self.large // group


_ANY = 1 << 30
# Head dim at most -> rows of a pass at most -> sizes.
_TABLE: dict[int, dict[int, Tuning]] = {
    64: {_ANY: Tuning(16, 64, 4, 128, 64, 4, warps=8, programs=1)},
    128: {_ANY: Tuning(16, 64, 4, 128, 64, 3, warps=8, programs=1)},
    256: {
        24: Tuning(16, 32, 3, 64, 32, 2, warps=4, programs=2, share=0.75),
        _ANY: Tuning(16, 64, 3, 128, 32, 3, warps=8, programs=1),
    },
}
