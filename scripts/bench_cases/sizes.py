"""How much work each case does: the sizes of DESIGN §8 on a GPU, seconds of it on a CPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens unless their name says otherwise.

    Attributes:
        threads: numbers of threads that decode at once.
        shared, own: context of the decode case: prefix of all threads, and own tokens of each,
            the mean over the timed steps.
        warm_steps, steps: decode steps before and while the clock runs.
        contexts: lengths at which fork, mount and rewind are timed.
        span, tool: sibling's text that is mounted, and tool text of the turn that reads it.
        repeats: timed calls of a primitive.
        prefix, new: the prefill case: shared prefix, and what follows it.
        chunks: values of `prefill_chunk` that the prefill case compares.
        prompt, baseline_steps: prompt and decode steps of transformers' `generate`.
        mix_scale: lengths of an episode mix are divided by this.
        flat_rounds: rounds of the mix that the flat baseline repeats; none means all.
        train_scale: lengths of the train mixes are divided by this.
        train_tokens: unique tokens of the longest row that is trained on.
        layer_tokens: rows of the single layers that are timed.
        page_size, prefill_chunk: of every engine.
        prefill_rate: tokens/s that the budget reckons with before any was measured.
    """

    threads: tuple[int, ...]
    shared: int
    own: int
    warm_steps: int
    steps: int
    contexts: tuple[int, ...]
    span: int
    tool: int
    repeats: int
    prefix: int
    new: int
    chunks: tuple[int, ...]
    prompt: int
    baseline_steps: int
    mix_scale: int
    flat_rounds: tuple[int, ...]
    train_scale: int
    train_tokens: int
    layer_tokens: int
    page_size: int
    prefill_chunk: int
    prefill_rate: float


SIZES = {
    "tiny": Sizes(
        threads=(4, 16),
        shared=256,
        own=32,
        warm_steps=2,
        steps=12,
        contexts=(256, 1024, 4096),
        span=64,
        tool=8,
        repeats=100,
        prefix=256,
        new=128,
        chunks=(32, 128),
        prompt=32,
        baseline_steps=6,
        mix_scale=512,
        flat_rounds=(),
        train_scale=16,
        train_tokens=2_048,
        layer_tokens=3_072,
        page_size=16,
        prefill_chunk=256,
        prefill_rate=2e3,
    ),
    "qwen3.5-4b": Sizes(
        threads=(8, 16, 64, 128, 256),
        shared=32_768,
        own=4_096,
        warm_steps=20,
        steps=300,
        contexts=(1_024, 8_192, 32_768, 131_072),
        span=8_192,
        tool=64,
        repeats=500,
        prefix=32_768,
        new=8_192,
        chunks=(512, 2_048, 8_192),
        prompt=1_024,
        baseline_steps=24,
        mix_scale=1,
        flat_rounds=(5, 12, 27),
        train_scale=1,
        train_tokens=131_072,
        layer_tokens=49_152,
        page_size=16,
        prefill_chunk=4_096,
        prefill_rate=1e4,
    ),
}
