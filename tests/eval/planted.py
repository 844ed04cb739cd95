"""A dense model whose weights are set by hand, so that its retrieval layers are known.

Tokens are one-hot in the residual stream. In a retrieval layer, a query token attends to the tokens
of one class wherever they stand (the slowest rotary pair carries the match) and writes the attended
token, which the head reads out. Every other layer attends at random and writes little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octopus_trl.eval.probes import Probe

VOCAB = 48
ASK, FIRST, SECOND, FILLER = 1, range(8, 20), range(20, 32), range(32, VOCAB)
# retrieval layer -> tokens that ask there, and the class that answers
HOPS = {2: ((ASK,), tuple(FIRST)), 4: (tuple(FIRST), tuple(SECOND))}


def planted_model(
    hops: Mapping[int, tuple[Sequence[int], Sequence[int]]],
    *,
    vocab_size: int = VOCAB,
    layers: int = 6,
    seed: int = 0,
) -> Any:
    """Build a Llama that answers with the attended token of a class, in given layers.

    Args:
        hops: layer -> (tokens that ask, tokens that answer).
    """
    width = 2 * vocab_size  # one half says which token this is, the other what was retrieved
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=width,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    draws = torch.Generator().manual_seed(seed)
    match = width // 2 - 1  # of the pair (i, i + width / 2) that hardly turns
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.002, generator=draws)
        each = torch.arange(vocab_size)
        model.model.embed_tokens.weight[each, each] = 1.0
        model.lm_head.weight[each, vocab_size + each] = 12.0 * width**-0.5
        for index, (askers, answers) in hops.items():
            attention = model.model.layers[index].self_attn
            attention.q_proj.weight[match, each] = -5.0  # who does not ask looks away
            for token in askers:
                attention.q_proj.weight[match, token] = 5.0
            for token in answers:
                attention.k_proj.weight[match, token] = 5.0
                attention.v_proj.weight[token, token] = 1.0
            attention.o_proj.weight[vocab_size + each, each] = 1.0
    return model.to(torch.float32)


def planted_probes(num: int, *, seed: int = 0, hops: int = 1) -> list[Probe]:
    """Draw probes for `HOPS`: the sibling's text holds one token of each class among fillers."""
    draws = torch.Generator().manual_seed(seed)

    def some(tokens: Sequence[int], count: int) -> tuple[int, ...]:
        picked = torch.randint(0, len(tokens), (count,), generator=draws).tolist()
        return tuple(tokens[index] for index in picked)

    probes = []
    for index in range(num):
        first, second = some(FIRST, 1), some(SECOND, 1)
        text = some(FILLER, 2) + first + some(FILLER, 3) + second + some(FILLER, 1)
        probes.append(
            Probe(
                id=f"planted-{seed}-{index}",
                prompt=some(FILLER, 2),
                sibling=text,
                own=some(FILLER, 3 + index % 9),
                question=(*some(FILLER, 1), ASK),
                answer=(first + second)[:hops],
            )
        )
    return probes
