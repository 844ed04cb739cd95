"""A prepared model is still the Hugging Face model that it was, for everyone who calls it so."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octopus_trl import prepare_model, score_traces
from tests import tolerances
from tests.parity.conftest import FAMILIES, Built, prepared
from tests.tiny import VOCAB, random_trace, tiny_dense, tiny_hybrid, with_lora

BUILDS: dict[str, Built] = {
    **FAMILIES,
    "hybrid-tied": (lambda: tiny_hybrid(1, tie=True), None),
    "dense-tied": (lambda: tiny_dense(1, tie=True), (1, 2)),
    "lora": (lambda: with_lora(tiny_hybrid(0)), None),
}
EACH = pytest.mark.parametrize("name", BUILDS)
BARE = pytest.mark.parametrize("name", [name for name in BUILDS if name != "lora"])


def both(name: str) -> tuple[Any, Any]:
    build, layers = BUILDS[name]
    stock = build()
    return stock, prepared(copy.deepcopy(stock), layers)


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def scores(model: Any) -> Tensor:
    with torch.no_grad():
        return torch.cat(score_traces(model, [random_trace(1, steps=6, max_tokens=80)])[0])


@EACH
@pytest.mark.parametrize("length", [1, 65, 130])
def test_a_plain_forward_gives_what_it_gave(name: str, length: int) -> None:
    stock, ours = both(name)
    ids = tokens(2, length)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, stock(ids).logits)


@BARE
@pytest.mark.parametrize("side", ["left", "right", "ragged"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_padded_batch_gives_what_it_gave(name: str, side: str, kernel: str) -> None:
    stock, ours = both(name)
    for model in (stock, ours):
        model.set_attn_implementation(kernel)
    ids = tokens(3, 20)
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :5] = mask[1, :17] = 0
    elif side == "right":
        mask[0, 5:] = mask[1, 17:] = 0
    else:
        mask[0, :3] = mask[2, 18:] = 0
    with torch.no_grad():
        got = ours(ids, attention_mask=mask)
        want = stock(ids, attention_mask=mask)
    assert torch.equal(got.logits[mask.bool()], want.logits[mask.bool()])


@BARE
def test_left_padding_moves_no_real_token(name: str) -> None:
    _, ours = both(name)
    ids = tokens(1, 12)
    padded = torch.cat([tokens(1, 5, seed=1), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)], dim=1)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = ours(ids).logits
        behind = ours(padded, attention_mask=mask, position_ids=places).logits[:, 5:]
    torch.testing.assert_close(behind, alone, rtol=0.0, atol=tolerances.LOGITS)


@BARE
def test_all_outputs_that_can_be_asked_for_are_what_they_were(name: str) -> None:
    stock, ours = both(name)
    for model in (stock, ours):
        model.set_attn_implementation("eager")
    ids = tokens(2, 9)
    options = {"labels": ids, "output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        got, want = ours(ids, **options), stock(ids, **options)
    assert torch.equal(got.loss, want.loss)
    assert len(got.hidden_states) == len(want.hidden_states) > 0
    assert len(got.attentions) == len(want.attentions) > 0
    for one, other in zip(
        [*got.hidden_states, *got.attentions], [*want.hidden_states, *want.attentions], strict=True
    ):
        assert torch.equal(one, other)


@BARE
def test_a_cached_continuation_gives_what_it_gave(name: str) -> None:
    stock, ours = both(name)
    ids = tokens(1, 23)
    results = []
    for model in (stock, ours):
        with torch.no_grad():
            first = model(ids[:, :15], use_cache=True)
            cache = first.cache if "cache" in first else first.past_key_values
            second = model(ids[:, 15:16], cache=cache, use_cache=True)
            results.append(torch.cat([first.logits, second.logits], dim=1))
    assert torch.equal(results[0], results[1])


@EACH
def test_plain_gradients_are_what_they_were(name: str) -> None:
    grads = []
    for model in both(name):
        model.train()
        ids = tokens(2, 11)
        model(ids, labels=ids).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert list(grads[0]) == list(grads[1])
    for key, grad in grads[0].items():
        assert (grad is None) == (grads[1][key] is None)
        assert grad is None or torch.equal(grad, grads[1][key])


@EACH
def test_names_of_parameters_modules_and_state_are_unchanged(name: str) -> None:
    stock, ours = both(name)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in stock.named_parameters()]
    assert [n for n, _ in ours.named_buffers()] == [n for n, _ in stock.named_buffers()]
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in stock.named_modules()]
    assert type(ours).__name__ == type(stock).__name__
    assert inspect.signature(ours.forward) == inspect.signature(stock.forward)
    assert isinstance(ours, type(stock))


@EACH
def test_preparing_happens_in_place_and_leaves_weights_alone(name: str) -> None:
    build, layers = BUILDS[name]
    model = build()
    kept = {key: (value.data_ptr(), value.clone()) for key, value in model.state_dict().items()}
    assert prepared(model, layers) is model
    for key, value in model.state_dict().items():
        assert value.data_ptr() == kept[key][0]
        assert torch.equal(value, kept[key][1])


@BARE
def test_the_models_config_is_unchanged(name: str) -> None:
    stock, ours = both(name)
    assert ours.config.to_dict() == stock.config.to_dict()
    assert ours.config.to_json_string() == stock.config.to_json_string()
    assert ours.config._attn_implementation == stock.config._attn_implementation


@BARE
def test_a_saved_model_is_the_stock_model_and_loads_as_one(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    stock, ours = both(name)
    stock.save_pretrained(tmp_path / "stock")
    ours.save_pretrained(tmp_path / "ours")
    first, second = (
        json.loads((tmp_path / which / "config.json").read_text()) for which in ("stock", "ours")
    )
    assert first == second
    assert second["architectures"] == [type(stock).__name__]
    weights = [(tmp_path / which / "model.safetensors") for which in ("stock", "ours")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(loaded) is type(stock)
    ids = tokens(1, 30)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, stock(ids).logits)
    assert torch.equal(
        scores(prepared(loaded, BUILDS[name][1])).nan_to_num(), scores(ours).nan_to_num()
    )


def test_a_saved_adapter_loads_on_a_prepared_and_on_a_stock_model(tmp_path: Path) -> None:
    from peft import PeftModel

    ours = prepare_model(with_lora(tiny_hybrid(0)))
    ours.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(tiny_hybrid(0), tmp_path).eval()
    again = PeftModel.from_pretrained(prepare_model(tiny_hybrid(0)), tmp_path).eval()
    ids = tokens(1, 30)
    with torch.no_grad():
        want = ours(ids).logits
        assert torch.equal(stock(ids).logits, want)
        assert torch.equal(again(ids).logits, want)
    assert torch.equal(scores(again).nan_to_num(), scores(ours).nan_to_num())


def test_merging_an_adapter_keeps_scores_and_the_prepared_model() -> None:
    ours = prepare_model(with_lora(tiny_hybrid(0)))
    before = scores(ours)
    merged = ours.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(scores(merged), before, rtol=0.0, atol=3e-5, equal_nan=True)


@EACH
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_generate_gives_what_it_gave(name: str, sample: bool) -> None:
    stock, ours = both(name)
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    outs = []
    for model in (stock, ours):
        torch.manual_seed(3)
        outs.append(
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=sample,
                max_new_tokens=12,
                pad_token_id=0,
            )
        )
    assert torch.equal(outs[0], outs[1])


@EACH
def test_a_deep_copy_is_prepared_and_independent(name: str) -> None:
    _, ours = both(name)
    ids = tokens(1, 12)
    with torch.no_grad():
        logits, want = ours(ids).logits, scores(ours)
        twin = copy.deepcopy(ours)
        assert torch.equal(scores(twin).nan_to_num(), want.nan_to_num())
        for parameter in twin.parameters():
            parameter.add_(0.1)
        assert torch.equal(ours(ids).logits, logits)
        assert torch.equal(scores(ours).nan_to_num(), want.nan_to_num())
        assert not torch.equal(twin(ids).logits, logits)


@EACH
def test_a_pickled_model_comes_back_prepared(name: str, tmp_path: Path) -> None:
    _, ours = both(name)
    again = pickle.loads(pickle.dumps(ours))
    assert torch.equal(scores(again).nan_to_num(), scores(ours).nan_to_num())
    torch.save(ours, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    ids = tokens(1, 12)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, ours(ids).logits)


@pytest.mark.slow
def test_a_model_pickled_in_another_process_scores_and_runs_here(tmp_path: Path) -> None:
    """The child never prepares a model: it only loads one."""
    ours = prepare_model(tiny_hybrid(0))
    torch.save(ours, tmp_path / "model.pt")
    code = (
        "import sys, torch; from octopus_trl import score_traces; from tests.tiny import *\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "trace = random_trace(1, steps=6, max_tokens=80)\n"
        "scores = torch.cat(score_traces(model, [trace])[0]).detach()\n"
        "logits = model(torch.arange(12)[None]).logits.detach()\n"
        "torch.save([scores, logits], sys.argv[2])\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, str(tmp_path / "model.pt"), str(tmp_path / "out.pt")]
    subprocess.run(command, check=True, cwd=root, capture_output=True)
    there, logits = torch.load(tmp_path / "out.pt")
    assert torch.equal(there.nan_to_num(), scores(ours).nan_to_num())
    with torch.no_grad():
        assert torch.equal(logits, ours(torch.arange(12)[None]).logits)


def test_preparing_again_changes_only_the_mount_set() -> None:
    model = prepare_model(tiny_hybrid(0, layers=8))
    wide = scores(model)
    narrow = scores(prepare_model(model, mount_layers=[7]))
    assert not torch.allclose(wide.nan_to_num(), narrow.nan_to_num(), atol=1e-3)
    fresh = scores(prepare_model(tiny_hybrid(0, layers=8), mount_layers=[7]))
    assert torch.equal(narrow.nan_to_num(), fresh.nan_to_num())
    assert torch.equal(scores(prepare_model(model)).nan_to_num(), wide.nan_to_num())


@BARE
def test_the_attention_kernel_of_the_model_is_read_when_it_runs(name: str) -> None:
    stock, ours = both(name)
    ids = tokens(1, 40)
    for kernel in ("eager", "sdpa"):
        for model in (stock, ours):
            model.set_attn_implementation(kernel)
        with torch.no_grad():
            assert torch.equal(ours(ids).logits, stock(ids).logits)
        scores(ours)
        assert ours.config._attn_implementation == kernel


def test_two_prepared_models_of_one_process_do_not_mix() -> None:
    first = prepare_model(tiny_hybrid(0))
    want = scores(first)
    prepare_model(tiny_hybrid(7, layers=8), mount_layers=[3])
    prepare_model(tiny_dense(0), mount_layers=[0])
    assert torch.equal(scores(first).nan_to_num(), want.nan_to_num())
    stock = tiny_hybrid(0)
    ids = tokens(1, 12)
    with torch.no_grad():
        assert torch.equal(stock(ids).logits, first(ids).logits)
    assert type(stock) is not type(first)


def test_plain_checkpointed_training_is_what_it_was() -> None:
    grads = []
    for model in both("hybrid"):
        model.train().gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        ids = tokens(1, 30)
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
