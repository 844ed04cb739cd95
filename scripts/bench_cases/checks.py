"""Results that must be right before their speed counts: the engine against the plain forward."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octopus_trl import Engine, SamplingParams

from .setting import Setting, WrongResult

# Largest ‖ours − plain‖/‖plain‖ of logits. In bf16 the plain forward itself is 0.02 to 0.03 from a
# float32 one after 8 random layers and 0.1 after 32, the engine as much; a wrong page, position or
# state gives an error near 1. Exact parity is the tests' business.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.25}
PROMPT, BRANCH, DRAWN = 97, 33, 8  # tokens


def tokens_of(setting: Setting, count: int, seed: int) -> list[int]:
    """Draw token ids."""
    draws = torch.Generator().manual_seed(seed)
    vocab_size = setting.load().config.vocab_size
    return torch.randint(0, vocab_size, (count,), generator=draws).tolist()


def warm_up(setting: Setting, engine: Engine) -> None:
    """Run each kind of pass once on a GPU, so that no clock sees a kernel being compiled."""
    if setting.device.type == "cuda":
        cursor = engine.open(tokens_of(setting, setting.sizes.prefill_chunk + 1, seed=10))
        engine.generate([cursor], SamplingParams(max_tokens=3, seed=0), until=())
        engine.close(cursor)


@torch.no_grad()
def plain_logits(model: Any, tokens: Sequence[int], keep: int = 1) -> Tensor:
    """Logits of the last `keep` positions from a plain forward, [keep, V] float32."""
    ids = torch.tensor([list(tokens)], device=model.device)
    return model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0].float()


def check_decode(setting: Setting) -> None:
    """Greedy turns on two branches of a prompt draw what a plain forward finds likeliest.

    Raises:
        WrongResult: a drawn token's logit lies further below the plain forward's highest than
            rounding explains, or the logits after the turn differ by more than that.
    """
    model, sizes = setting.load(), setting.sizes
    engine = Engine(model, page_size=sizes.page_size, num_pages=64, num_states=16)
    prompt = tokens_of(setting, PROMPT, seed=11)
    root = engine.open(prompt)
    branches = [tokens_of(setting, BRANCH + index, seed=12 + index) for index in range(2)]
    cursors = [engine.extend(engine.fork(root), branch) for branch in branches]
    greedy = SamplingParams(temperature=0.0, max_tokens=DRAWN)
    for cursor, branch, (drawn, _) in zip(
        cursors, branches, engine.generate(cursors, greedy, until=()), strict=True
    ):
        plain = plain_logits(model, [*prompt, *branch, *drawn], keep=DRAWN + 1)
        picked = plain[:-1].gather(1, torch.tensor(drawn, device=plain.device)[:, None])[:, 0]
        short = float((plain[:-1].max(-1).values - picked).max() / plain.std())
        # Two logits may each be off by the tolerance.
        if short > 2 * TOLERANCES[model.dtype]:
            raise WrongResult(f"a greedy token lies {short:.2e} standard deviations below the best")
        check_logits(setting, engine.logits(cursor), plain[-1])
    engine.sleep()


def check_logits(setting: Setting, ours: Tensor, plain: Tensor) -> None:
    """Compare logits [V] with those of a plain forward.

    Raises:
        WrongResult: they differ by more than rounding explains.
    """
    error = float((ours - plain).norm() / plain.norm())
    limit = TOLERANCES[setting.load().dtype]
    text = f"logits differ from the plain forward's by {error:.2e}, at most {limit}"
    print(text, file=sys.stderr)
    if not error <= limit:
        raise WrongResult(text)
