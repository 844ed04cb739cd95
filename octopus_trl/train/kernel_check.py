"""Kernels are compared with their references when a run starts, before anything is learnt.

A gated backward that is wrong trains silently: fla's is, on Hopper with some Triton versions. The
check draws runs of T = 1, 63, 64, 65 and 200 tokens, each from an initial state, and compares
output, final state and every gradient with the loop over single tokens in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octopus_trl.errors import ConfigError
from octopus_trl.kernels import select
from octopus_trl.kernels._attention_choice import choose
from octopus_trl.kernels.delta_rule import INSTALL
from octopus_trl.maths import attention, dag, delta_rule
from octopus_trl.models import spec_of
from octopus_trl.models.gated_delta import GatedDeltaPass

LENGTHS = (1, 63, 64, 65, 200)
TOLERANCE = 2e-2  # relative norm; 16-bit kernels stay below 1e-2, wrong ones are far off
_FIX = "OCTOPUS_KERNELS=maths trains on the slow references"


def check_kernels(model: nn.Module, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Check what a model's packed pass will run on and say what that is.

    Args:
        model: prepared; only its sizes are read.
        dtype: of activations, such as bfloat16 under autocast.
    Returns:
        Lines for the user: which kernels run packed attention and recurrence.
    Raises:
        ConfigError: a kernel is missing, or its result is not that of its reference.
    """
    attend = select("dag_attention", device)
    if not attend.__module__.startswith("octopus_trl.kernels"):
        return [f"packed pass on the references of maths/, device {device.type}"]
    spec = spec_of(model)
    check_attention(
        attend,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        dim=spec.head_dim,
        device=device,
        dtype=dtype,
    )
    lines = [f"packed attention: {choose(device, dtype, spec.head_dim).text}"]
    mixer: Any = next((m for m in model.modules() if isinstance(m, GatedDeltaPass)), None)
    if mixer is not None:
        check_gated_delta(
            select("gated_delta_rule", device),
            key_heads=mixer.num_k_heads,
            value_heads=mixer.num_v_heads,
            key_dim=mixer.head_k_dim,
            value_dim=mixer.head_v_dim,
            device=device,
            dtype=dtype,
        )
        lines.append("gated delta rule: kernels agree with the loop in float32, backward too")
    return lines


def compute_dtype(args: Any, model: nn.Module) -> torch.dtype:
    """Dtype of activations under a trainer's settings."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else next(model.parameters()).dtype


def check_gated_delta(
    rule: Callable[..., tuple[Tensor, Tensor]],
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Compare a gated delta rule with the float32 loop, forward and backward.

    Raises:
        ConfigError: a result or a gradient is off by more than `TOLERANCE`; names the tensor.
    """
    draw = _Draw(device)
    rows, runs = sum(LENGTHS), len(LENGTHS)
    inputs = {
        "q": draw.normal(rows, key_heads, key_dim).to(dtype),
        "k": draw.normal(rows, key_heads, key_dim).to(dtype),
        "v": draw.normal(rows, value_heads, value_dim).to(dtype),
        # Slow decay: what is lost of a state is seen far away.
        "g": -0.05 * draw.normal(rows, value_heads).abs(),
        "beta": draw.normal(rows, value_heads).sigmoid(),
        "initial_state": draw.normal(runs, value_heads, key_dim, value_dim) * key_dim**-0.5,
    }
    bounds = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    names = ("output", "final state", *(f"gradient of {name}" for name in inputs))

    def loop(**given: Tensor) -> tuple[Tensor, Tensor]:
        return delta_rule.gated_delta_rule(**given, cu_seqlens=bounds, form="recurrent")

    def fast(**given: Tensor) -> tuple[Tensor, Tensor]:
        return rule(**given, cu_seqlens=bounds)

    found, right = _both(fast, loop, inputs, draw)
    fix = f"install {INSTALL} (fla's own backward is wrong on Hopper with Triton 3.4 to 3.7.0)"
    _compare("gated delta rule", names, found, right, fix)


def check_attention(
    attend: Callable[..., Tensor],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Compare packed attention with the reference in float32, forward and backward.

    A trunk, two branches and a reader that mounts one of them, of lengths that fill no block.

    Raises:
        ConfigError: the output or a gradient is off by more than `TOLERANCE`; names the tensor.
    """
    draw = _Draw(device)
    plan = dag.layout([None, 0, 0, 2], [[], [], [], [1]], [130, 65, 63, 42]).plan
    inputs = {
        "q": draw.normal(plan.num_rows, heads, dim).to(dtype),
        "k": draw.normal(plan.num_rows, kv_heads, dim).to(dtype),
        "v": draw.normal(plan.num_rows, kv_heads, dim).to(dtype),
    }
    named: dict[str, Any] = {"plan": plan, "scale": dim**-0.5}

    def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return (attention.dag_attention(q, k=k, v=v, **named),)

    def fast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return (attend(q, k=k, v=v, **named),)

    found, right = _both(fast, exact, inputs, draw)
    names = ("output", *(f"gradient of {name}" for name in inputs))
    _compare("packed attention", names, found, right, "OCTOPUS_ATTENTION=flex takes other kernels")


class _Draw:
    """Normal draws that leave every generator of the run alone."""

    def __init__(self, device: torch.device) -> None:
        self._generator, self._device = torch.Generator().manual_seed(0), device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._device)


def _both(
    fast: Callable[..., tuple[Tensor, ...]],
    exact: Callable[..., tuple[Tensor, ...]],
    inputs: dict[str, Tensor],
    draw: _Draw,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run two forms of one function and give their results and gradients, in float32."""
    given = {name: value.requires_grad_() for name, value in inputs.items()}
    wide = {name: value.detach().float().requires_grad_() for name, value in inputs.items()}
    with torch.enable_grad():
        outs, rights = fast(**given), exact(**wide)
        weights = [draw.normal(*out.shape) for out in rights]
        results = []
        for results_of, leaves in ((outs, given), (rights, wide)):
            pairs = zip(results_of, weights, strict=True)
            loss = torch.stack([(out.float() * weight).sum() for out, weight in pairs]).sum()
            grads = torch.autograd.grad(loss, list(leaves.values()))
            results.append([x.detach().float() for x in (*results_of, *grads)])
    return results[0], results[1]


def _compare(
    what: str, names: tuple[str, ...], found: list[Tensor], right: list[Tensor], fix: str
) -> None:
    for name, fast, exact in zip(names, found, right, strict=True):
        error = float((fast - exact).norm() / exact.norm().clamp(min=1e-12))
        if not error <= TOLERANCE:
            raise ConfigError(
                f"{what}: {name} is off by {error:.2g} of its norm against the float32 reference, "
                f"at most {TOLERANCE} may be: training on it would go wrong silently; {fix}, or "
                f"{_FIX}"
            )
