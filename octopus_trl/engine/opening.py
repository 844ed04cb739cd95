"""Opening a prompt: go on from what is cached of it, and cache what is new."""

from __future__ import annotations

from collections.abc import Sequence

from octopus_trl.engine.cursor import Node
from octopus_trl.engine.prompts import PromptCache
from octopus_trl.engine.runner import Runner


def open_prompt(runner: Runner, prompts: PromptCache, prompt: Sequence[int], epoch: int) -> Node:
    """Give the boundary after a prompt; it is held once more, for the caller.

    What is new is prefilled chunk by chunk on one grid for all prompts, and every chunk's end
    becomes a boundary that later prompts can start from.

    Raises:
        PagesExhausted, StatesExhausted: too little room; nothing was changed.
    """
    tree, counters = runner.tree, runner.counters
    node = prompts.find(prompt)
    known = 0 if node is None else node.num_tokens
    lost = prompts.num_lost(prompt, known)
    if node is not None:
        tree.hold(node)  # making room must not evict it
    fresh: list[Node] = []
    try:
        last = None if node is None else node.ranges[-1]
        prompts.make_room(tree.pages.needed(last, len(prompt) - known))
        done = known
        while done < len(prompt):
            stop = min(len(prompt), (done // runner.prefill_chunk + 1) * runner.prefill_chunk)
            position = 0 if node is None else node.end
            grown = runner.grow(node, prompt[done:stop], (), position, epoch)
            if node is not None:
                tree.drop(node)
            tree.pin(grown)
            fresh.append(grown)
            node, done = grown, stop
    except BaseException:
        if node is not None:
            tree.drop(node)
        raise
    else:
        assert node is not None
        for boundary in fresh or [node]:
            prompts.keep(prompt[: boundary.num_tokens], boundary)
    finally:
        for boundary in fresh:
            tree.unpin(boundary)
    counters.opens += 1
    counters.reused += known
    counters.re_prefilled += lost
    counters.prefilled += len(prompt) - known - lost
    return node
