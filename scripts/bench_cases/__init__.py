"""Cases of `scripts/bench.py`: one module each, with `run(setting) -> Iterator[Line]`."""

# In the order in which they run when none is named; a module that is not there yet is said so.
CASES = (
    "decode",
    "fork",
    "mount",
    "rewind",
    "prefill",
    "episode",
    "packed",
    "attention",
    "kernels",
    "layers",
    "train",
)
