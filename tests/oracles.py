"""Brute force for episode DAGs, built on the stock transformers modules and nothing of ours.

One layer at a time over all tokens of a trace: attention through the stock module with an explicit
[T, T] mask, recurrent layers through the stock mixer on every chain from its root, so that no state
is ever handed over. Nothing here imports octopus_trl.maths, kernels or models; a trace is read for
its tokens, edges and recorded positions only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface
from transformers.models.qwen3_5.modeling_qwen3_5 import repeat_kv

Edges = Sequence[Sequence[int]]


@dataclass
class Flat:
    """Tokens of a trace in creation order.

    Attributes:
        first: row of the first token of each segment, and T at the end.
        chains: for each segment, its ancestors from the root on, then itself.
        tree, mounted: [T, T + X] bool, what each row sees along its chain (itself included), and
            what it sees only through mounts.
        copies: under `position: rerotate`, the X keys that are read as copies: row and how far
            each moves. Without it there are none.
        passed: for each segment, those whose rows a recurrent layer steps through before it
            (`exchange: splice`).
    """

    tokens: Tensor
    positions: Tensor
    first: list[int]
    chains: list[list[int]]
    tree: Tensor
    mounted: Tensor
    copies: list[tuple[int, int]]
    passed: list[list[int]]

    def rows(self, segments: Iterable[int]) -> list[int]:
        """List the rows of some segments in the order given."""
        return [row for s in segments for row in range(self.first[s], self.first[s + 1])]


def flatten(trace: Any) -> Flat:
    """Write out a trace token by token, from the definitions of DESIGN §2."""
    segments = trace.segments
    first = [0]
    for segment in segments:
        first.append(first[-1] + len(segment.tokens))
    total = first[-1]
    chains: list[list[int]] = []
    copies: list[tuple[int, int]] = []
    place: dict[int, range] = {}  # segment that mounts -> columns of what it reads as copies
    rule = getattr(trace, "position", "jump")
    for index, segment in enumerate(segments):
        above = [] if segment.parent is None else chains[segment.parent]
        chains.append([*above, index])
        if rule == "rerotate" and segment.mounts:
            ends = [segments[m].start + len(segments[m].tokens) for m in segment.mounts]
            far = segment.start - max(ends)
            rows = [row for m in segment.mounts for row in range(first[m], first[m + 1])]
            place[index] = range(total + len(copies), total + len(copies) + len(rows))
            copies += [(row, far) for row in rows]
    tree = torch.zeros(total, total + len(copies), dtype=torch.bool)
    mounted = torch.zeros(total, total + len(copies), dtype=torch.bool)
    for index, chain in enumerate(chains):
        above = chain[:-1]
        read = {mount for link in chain for mount in segments[link].mounts}
        for row in range(first[index], first[index + 1]):
            for link in above:
                tree[row, first[link] : first[link + 1]] = True
            tree[row, first[index] : row + 1] = True
            if rule == "rerotate":
                for link in chain:
                    mounted[row, list(place.get(link, ()))] = True
                continue
            for mount in read:
                mounted[row, first[mount] : first[mount + 1]] = True
    spliced = getattr(trace, "exchange", "mount") == "splice"
    passed = [list(segment.mounts) if spliced else [] for segment in segments]
    tokens = [token for segment in segments for token in segment.tokens]
    positions = [segment.start + i for segment in segments for i in range(len(segment.tokens))]
    return Flat(
        torch.tensor(tokens),
        torch.tensor(positions),
        first,
        chains,
        tree,
        mounted & ~tree,
        copies,
        passed,
    )


@dataclass
class Copy:
    """A segment of a trace that was spelled out: one of its own, or text prefilled again."""

    tokens: Sequence[int]
    parent: int | None
    mounts: Sequence[int]
    start: int


@dataclass
class Spelled:
    """A trace whose readers read copies, with each copy as a segment of its own.

    Attributes:
        where: index of each segment of the trace among `segments`.
    """

    segments: list[Copy]
    where: list[int]


def spell_out(trace: Any) -> Spelled:
    """Write `position: reencode` out: before a segment that mounts comes the text of its mounts, a
    child of the same parent at the positions just past it, and the segment mounts that instead.
    """
    spelled = Spelled([], [])
    for segment in trace.segments:
        parent = None if segment.parent is None else spelled.where[segment.parent]
        read: list[int] = []
        if segment.mounts:
            text = [token for mount in segment.mounts for token in trace.segments[mount].tokens]
            begin = 0
            if parent is not None:
                begin = spelled.segments[parent].start + len(spelled.segments[parent].tokens)
            assert segment.start == begin + len(text)
            read = [len(spelled.segments)]
            spelled.segments.append(Copy(text, parent, [], begin))
        spelled.where.append(len(spelled.segments))
        spelled.segments.append(Copy(segment.tokens, parent, read, segment.start))
    return spelled


def brute_hidden(
    model: nn.Module, trace: Any, *, mount_layers: Sequence[int] | None = None, mounts: str = "live"
) -> tuple[Flat, Tensor]:
    """Run every layer over the whole DAG.

    Args:
        model: a stock causal LM, PEFT-wrapped or not, never prepared.
        mount_layers: attention layers that see mounts; None for all of them.
        mounts: "live", "detached" (no gradient through a mounted key or value) or "dropped".
    Returns:
        The flat trace and the normed last hidden states [T, d].
    """
    flat = flatten(trace)
    base = _base(model)
    kinds = getattr(base.config, "layer_types", None) or ["full_attention"] * len(base.layers)
    if mount_layers is None:
        mount_layers = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    leaves = [s for s in range(len(flat.chains)) if not any(s in c[:-1] for c in flat.chains)]
    hidden = base.embed_tokens(flat.tokens[None]) * getattr(base, "embedding_multiplier", 1.0)
    rotary = base.rotary_emb
    rope = None if rotary is None else rotary(hidden, flat.positions[None])
    for index, layer in enumerate(base.layers):
        x = layer.input_layernorm(hidden)
        if kinds[index] == "linear_attention":
            mixer = layer.mamba if hasattr(layer, "mamba") else layer.linear_attn
            mixed = _recurrent(mixer, x, flat, leaves, mounts)
        else:
            reads = mounts != "dropped" and index in mount_layers
            far = flat.mounted if reads else torch.zeros_like(flat.mounted)
            mixed = _attend(base, layer.self_attn, x, rope, flat, far, mounts == "detached")
        scale = getattr(layer, "residual_multiplier", 1.0)
        hidden = hidden + mixed * scale
        hidden = hidden + _feed_forward(layer, hidden) * scale
    last = base.final_layernorm if hasattr(base, "final_layernorm") else base.norm
    return flat, last(hidden)[0]


def brute_logps(
    model: nn.Module,
    trace: Any,
    *,
    mount_layers: Sequence[int] | None = None,
    mounts: str = "live",
    temperature: float = 1.0,
) -> list[Tensor]:
    """Score every token of every segment; a root's first token is NaN (see `brute_hidden`)."""
    flat, hidden = brute_hidden(model, trace, mount_layers=mount_layers, mounts=mounts)
    logits = logits_of(model, hidden) / temperature
    logps = torch.log_softmax(logits, dim=-1)
    scores = []
    for index, segment in enumerate(trace.segments):
        lo, hi = flat.first[index], flat.first[index + 1]
        before = list(range(lo - 1, hi - 1))
        if segment.parent is not None:
            before[0] = flat.first[segment.parent + 1] - 1
        score = logps[before, segment.tokens]
        if segment.parent is None:
            score = torch.cat([score.new_full((1,), float("nan")), score[1:]])
        scores.append(score)
    return scores


def brute_next_logits(model: nn.Module, trace: Any, **options: Any) -> list[Tensor]:
    """Give the float32 logits [vocab] after the last token of every segment."""
    flat, hidden = brute_hidden(model, trace, **options)
    logits = logits_of(model, hidden)
    return [logits[flat.first[index + 1] - 1] for index in range(len(trace.segments))]


@torch.no_grad()
def plain_logps(model: nn.Module, trace: Any, segment: int) -> Tensor:
    """Score the last segment of a chain with one plain forward of the stock model; no mounts."""
    tokens, positions = trace.linearize(segment)
    logits = model(
        input_ids=torch.tensor([tokens]),
        position_ids=torch.tensor([positions]),
        use_cache=False,
    ).logits[0]
    logps = torch.log_softmax(logits.float(), dim=-1)
    score = logps[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    score = torch.cat([score.new_full((1,), float("nan")), score])
    return score[len(tokens) - len(trace.segments[segment].tokens) :]


def gradients(model: nn.Module, scores: Sequence[Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Differentiate a fixed random weighting of all scores, NaN ones left out.

    Returns:
        Gradient of each trainable parameter, zeros where it has none.
    """
    loss = weighted(scores, seed)
    model.zero_grad(set_to_none=True)
    loss.backward()
    grads = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return grads


def weighted(scores: Sequence[Tensor], seed: int = 0) -> Tensor:
    """Sum all scores with fixed random weights in 0.5..1.5, NaN ones left out."""
    flat = torch.cat(list(scores))
    weights = 0.5 + torch.rand(len(flat), generator=torch.Generator().manual_seed(seed))
    return (flat * weights)[~flat.isnan()].sum()


def _feed_forward(layer: Any, hidden: Tensor) -> Tensor:
    """Run the rest of a stock layer after its mixer: norm and MLP, by the family's names."""
    if hasattr(layer, "feed_forward"):  # Bamba
        return layer.feed_forward(layer.pre_ff_layernorm(hidden))
    mlp = layer.shared_mlp if hasattr(layer, "shared_mlp") else layer.mlp  # Granite, Qwen
    return mlp(layer.post_attention_layernorm(hidden))


def logits_of(model: nn.Module, hidden: Tensor) -> Tensor:
    """Apply the output layer and the family's constant; float32."""
    causal_lm = _lm(model)
    return causal_lm.lm_head(hidden).float() / getattr(causal_lm.config, "logits_scaling", 1.0)


def _recurrent(
    mixer: nn.Module, x: Tensor, flat: Flat, leaves: Sequence[int], mounts: str
) -> Tensor:
    """Run the stock mixer on each chain from its root; a shared segment is taken once.

    What a splice steps through stands in the chain as rows of others, whose outputs are dropped.
    Where mounts are detached, so is what the input projections make of those rows.
    """
    pieces: dict[int, Tensor] = {}
    for leaf in leaves:
        chain = flat.chains[leaf]
        rows: list[int] = []
        lengths: list[int] = []
        foreign: list[bool] = []
        for segment in chain:
            passed = flat.rows(flat.passed[segment]) if mounts != "dropped" else []
            own = flat.rows([segment])
            rows += [*passed, *own]
            lengths += [len(passed), len(own)]
            foreign += [True] * len(passed) + [False] * len(own)
        hooks = []
        if mounts == "detached" and any(foreign):
            cut = torch.tensor(foreign)[None, :, None]
            hooks = [
                child.register_forward_hook(
                    lambda _, __, out, cut=cut: torch.where(cut, out.detach(), out)
                )
                for name, child in mixer.named_children()
                if name.startswith("in_proj")
            ]
        try:
            out = mixer(hidden_states=x[:, rows])[0]
        finally:
            for hook in hooks:
                hook.remove()
        for segment, piece in zip(chain, out.split(lengths)[1::2], strict=True):
            pieces.setdefault(segment, piece)
    return torch.cat([pieces[segment] for segment in sorted(pieces)])[None]


def _attend(
    base: Any,
    attention: Any,
    x: Tensor,
    rope: Any,
    flat: Flat,
    mounted: Tensor,
    detached: bool,
) -> Tensor:
    """Run the stock attention module under an explicit mask."""
    kept = base.config._attn_implementation
    tree = flat.tree
    own = bool(flat.copies) or detached
    base.config._attn_implementation = "oracle" if own else "eager"
    mask = torch.zeros(tree.shape, dtype=x.dtype).masked_fill(~(tree | mounted), float("-inf"))
    given: dict[str, Any] = {"oracle_mounted": mounted} if detached else {}
    if flat.copies:
        given["oracle_copies"] = flat.copies
        given["oracle_rotary"] = base.rotary_emb
    try:
        return attention(
            hidden_states=x,
            position_embeddings=rope,
            attention_mask=mask[None, None],
            **given,
        )[0]
    finally:
        base.config._attn_implementation = kept


def _oracle_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    oracle_mounted: Tensor | None = None,
    oracle_copies: Sequence[tuple[int, int]] = (),
    oracle_rotary: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend to copies of keys too, with the gradient cut where something is read by a mount."""
    rows = [row for row, _ in oracle_copies]
    moved = _moved(key[:, :, rows], [far for _, far in oracle_copies], oracle_rotary)
    key = repeat_kv(torch.cat([key, moved], dim=2), module.num_key_value_groups)
    value = torch.cat([value, value[:, :, rows]], dim=2)
    value = repeat_kv(value, module.num_key_value_groups)
    live = query @ key.transpose(2, 3)
    if oracle_mounted is None:
        weights = (live * scaling + attention_mask).softmax(dim=-1)
        return (weights @ value).transpose(1, 2), None
    cut = query @ key.detach().transpose(2, 3)
    scores = torch.where(oracle_mounted, cut, live) * scaling + attention_mask
    weights = scores.softmax(dim=-1)
    far = weights * oracle_mounted
    out = (weights - far) @ value + far @ value.detach()
    return out.transpose(1, 2), None


def _moved(keys: Tensor, fars: Sequence[int], rotary: Any) -> Tensor:
    """Turn keys [1, KV, X, D] on as complex numbers, each by its own number of positions."""
    if rotary is None or not fars:
        return keys
    frequencies = rotary.inv_freq.double()
    half = len(frequencies)
    pairs = torch.complex(keys[..., :half].double(), keys[..., half : 2 * half].double())
    angles = torch.tensor(fars, dtype=torch.float64)[:, None] * frequencies
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    parts = [turned.real.to(keys.dtype), turned.imag.to(keys.dtype), keys[..., 2 * half :]]
    return torch.cat(parts, dim=-1)


AttentionInterface.register("oracle", _oracle_attention)


def _lm(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _base(model: nn.Module) -> Any:
    return _lm(model).model
