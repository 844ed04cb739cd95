"""Opening a prompt: go on from what is cached of it, and cache what is new."""

from __future__ import annotations

from collections.abc import Sequence

from octopus_trl.engine.cursor import Node
from octopus_trl.engine.prompts import PromptCache
from octopus_trl.engine.runner import Runner

STRIDE = 4096  # tokens between the boundaries that a long prompt keeps the state of


def open_prompt(runner: Runner, prompts: PromptCache, prompt: Sequence[int], epoch: int) -> Node:
    """Give the boundary after a prompt; it is held once more, for the caller.

    Whatever tokens an earlier prompt has in common with this one are reused. Where two prompts part
    the recurrent state is built once from the nearest that is kept, and kept for the third.

    Raises:
        PagesExhausted, StatesExhausted: too little room; nothing was changed.
    """
    tree, counters = runner.tree, runner.counters
    node = prompts.find(prompt)
    known = 0 if node is None else node.num_tokens
    evicted, stale = prompts.num_lost(prompt, known)
    if node is not None:
        tree.hold(node)  # making room must not evict it
    kept: list[Node] = []

    def keep_state(boundary: Node) -> None:
        tree.pin(boundary)
        kept.append(boundary)

    try:
        if node is not None:
            keep_state(node)
        last = None if node is None else node.ranges[-1]
        prompts.make_room(tree.pages.needed(last, len(prompt) - known))
        if node is not None and not node.stated:
            runner.ensure_state(node, "branch")
        done = known
        while done < len(prompt):
            stop = min(len(prompt), (done // STRIDE + 1) * STRIDE)
            position = 0 if node is None else node.end
            grown = runner.grow(node, prompt[done:stop], (), position, epoch)
            if node is not None:
                tree.drop(node)
            node, done = grown, stop
            keep_state(node)
    except BaseException:
        if node is not None:
            tree.drop(node)
        raise
    else:
        assert node is not None
        for boundary in kept:
            prompts.keep(prompt[: boundary.num_tokens], boundary)
    finally:
        for boundary in kept:
            tree.unpin(boundary)
    counters.opens += 1
    counters.reused += known
    counters.context_tokens += len(prompt)
    counters.miss("evicted", evicted)
    counters.miss("stale", stale)
    counters.miss("first_seen", len(prompt) - known - evicted - stale)
    return node
