"""Under ZeRO-3 each rank generates by itself, from a whole copy that follows the training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from octopus_trl import prepare_model
from octopus_trl.train.resident import ResidentCopy
from octopus_trl.train.zero import in_parts
from tests.tiny import tiny_dense, tiny_hybrid, with_lora
from tests.tolerances import KL_CPU
from tests.train.forks import DEEPSPEED
from tests.train.generating_worker import CASES, RANKS


@pytest.mark.skipif(
    not DEEPSPEED, reason="deepspeed is not installed: DS_BUILD_OPS=0 pip install deepspeed"
)
@pytest.mark.timeout(900)
def test_generation_waits_for_no_rank_and_draws_with_the_weights_of_its_step(
    run_scene: Callable[..., None], tmp_path: Path
) -> None:
    run_scene("generating", tmp_path)
    for case in CASES:
        ranks = [
            torch.load(tmp_path / case / f"found_{rank}.pt", weights_only=False)
            for rank in range(RANKS)
        ]
        for found in ranks:
            before, after = found["generations"]
            assert found["wrapped"] == "DeepSpeedEngine"
            assert (before["version"], after["version"]) == (0, 1)
            # No collective although the ranks made different numbers of passes.
            assert before["collectives"] == after["collectives"] == []
            assert not before["split"]
            assert before["addresses"] == after["addresses"]
            # What was kept from before the update is refused, and the weights are the new ones.
            assert after["stale"] == [True]
            assert not torch.equal(before["probe"], after["probe"])
            kl = [entry["rollout_kl/mean"] for entry in found["log"] if "rollout_kl/mean" in entry]
            assert len(kl) == 2
            assert max(kl) <= KL_CPU
            held, peak, refreshed = found["bytes"]
            assert held == found["expected_bytes"][0]
            assert 0 < peak <= found["expected_bytes"][1]
            assert (refreshed == held) == (case == "full")
            assert "resident copy for generation" in found["described"]
        counts = [found["generations"][-1]["decoded"] for found in ranks]
        assert counts[0] < counts[1]
        for one, other in zip(*(found["generations"] for found in ranks), strict=True):
            assert torch.equal(one["probe"], other["probe"])

    # What was saved between the two generations is whole, and what the second one drew with.
    for case, file in (("adapter", "adapter_model"), ("full", "model")):
        saved = load_file(tmp_path / case / "run/checkpoint-1" / f"{file}.safetensors")
        found = torch.load(tmp_path / case / "found_0.pt", weights_only=False)
        drawn = as_saved(found["generations"][1]["trained"])
        assert saved.keys() == drawn.keys() == as_saved(found["shapes"]).keys()
        for name, value in saved.items():
            assert tuple(value.shape) == as_saved(found["shapes"])[name]
            assert value.norm() > 0
            assert torch.equal(value, drawn[name]), name


def as_saved(named: dict[str, Any]) -> dict[str, Any]:
    """Name parameters as PEFT does on disk."""
    return {name.replace(".default.", "."): value for name, value in named.items()}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("build", [tiny_hybrid, tiny_dense])
def test_a_copy_is_the_same_model_in_memory_of_its_own(
    build: Any, adapted: bool, tie: bool
) -> None:
    source = prepare_model(build(3, tie=tie), mount_layers=[3])
    if adapted:
        source = with_lora(source)
    copied = ResidentCopy(source, torch.device("cpu")).model
    own = {p.data_ptr() for p in source.parameters()}
    assert not own & {p.data_ptr() for p in copied.parameters()}
    assert copied.state_dict().keys() == source.state_dict().keys()
    assert len(list(copied.parameters())) == len(list(source.parameters()))
    assert not any(p.requires_grad for p in copied.parameters())
    assert not any(value.is_meta for value in [*copied.parameters(), *copied.buffers()])
    tokens = torch.randint(97, (1, 65))
    with torch.no_grad():
        assert torch.equal(copied(tokens).logits, source(tokens).logits)


def test_a_refresh_takes_what_trains_in_place_and_nothing_else() -> None:
    source = with_lora(prepare_model(tiny_hybrid(4)))
    resident = ResidentCopy(source, torch.device("cpu"))
    copied = dict(resident.model.named_parameters())
    places = {name: p.data_ptr() for name, p in copied.items()}
    old = {name: p.clone() for name, p in copied.items()}
    for name, parameter in source.named_parameters():
        parameter.requires_grad_("lora_" in name)
        with torch.no_grad():
            parameter.add_(1.0)
    resident.refresh()
    for name, parameter in source.named_parameters():
        assert copied[name].data_ptr() == places[name]
        assert torch.equal(copied[name], parameter if "lora_" in name else old[name]), name
    trained = [p for p in source.parameters() if p.requires_grad]
    assert resident.refreshed_bytes == sum(4 * p.numel() for p in trained)


def test_parts_hold_at_most_so_many_bytes_or_one_parameter_and_keep_the_order() -> None:
    sizes = [3, 1, 9, 2, 2, 8]
    named = [(str(at), nn.Parameter(torch.zeros(size))) for at, size in enumerate(sizes)]
    parts = [[name for name, _ in part] for part in in_parts(named, most_bytes=4 * 5)]
    assert parts == [["0", "1"], ["2"], ["3", "4"], ["5"]]
