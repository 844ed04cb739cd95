"""Layers of an update with less traffic: the same numbers, and the model stays what it was."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.helpers import disable_input_dtype_casting
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from octopus_trl import score_traces
from octopus_trl.models import lean_layers as module
from octopus_trl.models.lean_layers import lean_layers
from octopus_trl.models.mlp_tiles import tile_mlps
from tests.kernels.interpreter import mend_loop_bounds
from tests.parity.conftest import FAMILIES, prepared
from tests.tiny import random_trace, tiny_dense, tiny_hybrid, with_lora

Grads = dict[str, torch.Tensor]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU take the fused layers, on the references of the kernels."""
    monkeypatch.setattr(module, "takes", lambda x: x.dtype != torch.float64)


def built(name: str = "hybrid", *, lora: bool = True, narrow: bool = False) -> Any:
    """Make a prepared model in training mode; `narrow` weights are bfloat16, adapters float32."""
    build, layers = FAMILIES[name]
    model = build()
    if narrow:
        model = model.bfloat16()
    if not lora:
        return prepared(model, layers).train()
    model.requires_grad_(False)
    return prepared(with_lora(model), layers).train()


def update(
    model: Any, *, narrow: bool = False, around: AbstractContextManager[Any] | None = None
) -> tuple[torch.Tensor, Grads]:
    """Give the scores of two traces and the gradients of their mean."""
    model.zero_grad(set_to_none=True)
    with around or nullcontext():
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            parts = score_traces(model, [random_trace(seed, steps=9) for seed in (0, 1)])
        scores = torch.cat([x for trace in parts for x in trace if x.isfinite().all()])
        scores.mean().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return scores.detach(), found


def assert_equal(found: tuple[torch.Tensor, Grads], want: tuple[torch.Tensor, Grads]) -> None:
    assert torch.equal(found[0], want[0])
    assert found[1].keys() == want[1].keys()
    assert found[1]
    assert [name for name, grad in want[1].items() if not torch.equal(found[1][name], grad)] == []


class Conversions(TorchDispatchMode):
    """Counts conversions of whole rows between float dtypes."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.seen = rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.numel() >= self.rows:
            self.seen += out.dtype != args[0].dtype
        return out


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["none", "plain", "reentrant"])
def test_without_the_two_conversions_an_update_keeps_its_bits(checkpointing: bool | None) -> None:
    model = built(narrow=True)
    if checkpointing is not None:
        model.enable_input_require_grads()
        kind = {"use_reentrant": checkpointing}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kind)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    want = update(model, narrow=True)
    assert_equal(update(model, narrow=True, around=lean_layers(model, fused=False)), want)
    assert_equal(update(model, narrow=True, around=disable_input_dtype_casting(model)), want)


def test_each_adapted_layer_makes_fewer_conversions() -> None:
    model = built("dense", narrow=True)
    layers = sum(hasattr(part, "lora_A") for part in model.modules())
    counts = []
    for around in (nullcontext(), lean_layers(model, fused=False)):
        with Conversions(rows=500) as count:
            update(model, narrow=True, around=around)
        counts.append(count.seen)
    # Forward: to float32 and back; backward: the same of the gradient, which the embeddings that
    # the first layer's q, k and v read need not.
    assert counts[0] - counts[1] == 4 * layers - 2 * 3


@pytest.mark.parametrize("fused", [False, True])
def test_without_autocast_nothing_changes(fused: bool) -> None:
    for model in (built(), built(narrow=True)):
        assert_equal(update(model, around=lean_layers(model, fused=fused)), update(model))


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", FAMILIES)
def test_norms_and_gates_are_those_of_the_modules(name: str, monkeypatch: Any) -> None:
    ran: Counter[str] = Counter()
    select = module.select

    def counted(op: str, device: torch.device) -> Any:
        ran[op] += 1
        return select(op, device)

    monkeypatch.setattr(module, "select", counted)
    model = built(name, lora=False)
    want = update(model)
    assert_equal(update(model, around=lean_layers(model, fused=True)), want)
    norms = [part for part in model.modules() if type(part).__name__.endswith("RMSNorm")]
    assert ran["packed_rms_norm"] == len(norms)
    assert bool(ran["packed_swiglu"]) == (name != "granite")  # whose MLP is two products
    assert bool(ran["packed_gated_norm"]) == name.startswith("hybrid")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's tensors need the interpreter")
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", ["hybrid", "dense"])
def test_the_kernels_take_what_the_modules_get(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted: heads that lie apart in a wider product, gates, weights that train."""
    pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.6,<3.8'")
    packed_layers = import_module("octopus_trl.kernels.packed_layers")
    mend_loop_bounds()
    monkeypatch.setattr(module, "select", lambda op, device: getattr(packed_layers, op))
    model = built(name, lora=False)
    want, want_grads = update(model)
    found, grads = update(model, around=lean_layers(model, fused=True))
    torch.testing.assert_close(found, want, atol=2e-5, rtol=2e-5)
    assert grads.keys() == want_grads.keys()
    for key, grad in want_grads.items():
        assert (grads[key] - grad).norm() <= 1e-4 * grad.norm() + 1e-7, key


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["none", "plain", "reentrant"])
def test_an_adapter_within_its_product_is_rounded_less(checkpointing: bool | None) -> None:
    model = built("dense", narrow=True)
    exact = update(copy.deepcopy(model).float())
    if checkpointing is not None:
        model.enable_input_require_grads()
        kind = {"use_reentrant": checkpointing}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kind)
    errors = []
    for around in (nullcontext(), lean_layers(model, fused=True)):
        scores, grads = update(model, narrow=True, around=around)
        assert grads.keys() == exact[1].keys()
        far = [(grads[name] - grad).norm() / grad.norm() for name, grad in exact[1].items()]
        errors.append((float((scores - exact[0]).norm()), float(torch.stack(far).mean())))
    (stock, stock_grads), (lean, lean_grads) = errors
    assert 0 < lean <= 1.1 * stock
    assert 0 < lean_grads <= 1.1 * stock_grads


@pytest.mark.usefixtures("everywhere")
def test_an_adapter_of_the_weights_own_dtype_needs_no_autocast() -> None:
    """As DeepSpeed keeps it."""
    model = built("dense", narrow=True).bfloat16()
    want, found = update(model), update(model, around=lean_layers(model, fused=True))
    assert not torch.equal(found[0], want[0])
    torch.testing.assert_close(found[0], want[0], atol=0.2, rtol=0.02)
    assert found[1].keys() == want[1].keys()


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("alpha", [3, 6])
def test_one_adapted_layer_equals_its_sum_in_float64(alpha: int) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(31, 17, bias=True)).bfloat16()
    config = LoraConfig(r=5, lora_alpha=alpha, target_modules=["0"], init_lora_weights=False)
    model = get_peft_model(layer, config)
    x = torch.randn(1, 65, 31).bfloat16().requires_grad_()
    adapted: Any = model.base_model.model[0]
    a, b = (adapted.get_submodule(f"lora_{n}.default").weight.bfloat16().double() for n in "AB")
    base = adapted.base_layer
    low = (x.detach().double() @ a.T).bfloat16().double()
    exact = x.detach().double() @ base.weight.double().T + base.bias.double()
    exact = exact.bfloat16().double() + alpha / 5 * (low @ b.T)
    with lean_layers(model, fused=True), torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert (out.dtype, out.shape) == (torch.bfloat16, (1, 65, 17))
    # Half a unit in the last place, and a little for a sum in float32.
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-3).all()
    out.sum().backward()
    assert x.grad is not None
    assert adapted.lora_B["default"].weight.grad.norm() > 0


@pytest.mark.usefixtures("everywhere")
def test_what_is_no_plain_adapter_runs_as_it_is() -> None:
    x = torch.randn(1, 9, 16).bfloat16()

    def wrapped(**settings: Any) -> Any:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(16, 16)).bfloat16()
        config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False, **settings)
        return get_peft_model(layer, config)

    @contextmanager
    def merged(model: Any) -> Iterator[None]:
        model.merge_adapter()
        yield

    gathered = wrapped()
    gathered.base_model.model[0].lora_B["default"].weight.ds_id = 7
    for model, state in [
        (wrapped(use_dora=True), None),
        (wrapped(lora_bias=True), None),
        (gathered, None),
        (off := wrapped(), off.disable_adapter()),
        (kept := wrapped(), merged(kept)),
    ]:
        with state or nullcontext(), torch.autocast("cpu", torch.bfloat16):
            want = model(x)
            with lean_layers(model, fused=True):
                assert torch.equal(model(x), want)


@pytest.mark.usefixtures("everywhere")
def test_tiles_compute_with_the_lean_layers() -> None:
    model = built("hybrid", lora=False)
    tile_mlps(model, 50)
    want = update(model)
    assert_equal(update(model, around=lean_layers(model, fused=True)), want)


@pytest.mark.usefixtures("everywhere")
def test_a_norm_that_peft_trains_whole_gets_its_gradient() -> None:
    model = tiny_dense(0).requires_grad_(False)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["q_norm"])
    model = prepared(get_peft_model(model, config), (1, 2)).train()
    want = update(model)
    assert any("q_norm.modules_to_save" in name for name in want[1])
    assert_equal(update(model, around=lean_layers(model, fused=True)), want)


def test_the_model_is_what_it_was_afterwards() -> None:
    model = built()
    tile_mlps(model, 64)
    before = {name: set(vars(part)) for name, part in model.named_modules()}
    names = list(model.state_dict())
    with lean_layers(model, fused=True), lean_layers(model, fused=True):
        assert list(model.state_dict()) == names
        copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), lean_layers(model, fused=True):
        raise KeyError
    assert {name: set(vars(part)) for name, part in model.named_modules()} == before


def test_a_forward_that_somebody_else_has_set_stays() -> None:
    model = prepared(tiny_hybrid(0), None)
    norm = model.model.norm
    norm.forward = own = nn.Identity().forward
    with lean_layers(model, fused=True):
        assert norm.forward is own
    assert norm.forward is own
