"""Merged export: plain weights that give what the adapter gives."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from octopus_trl import prepare_model
from octopus_trl.errors import ConfigError
from octopus_trl.train.export import export_merged, merged_state
from tests.tiny import tiny_dense, tiny_hybrid, with_lora
from tests.train.runs import tokenizer

ROOT = Path(__file__).parents[2]
IDS = torch.arange(40)[None] * 7 % 97


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_a_merged_export_loads_in_plain_transformers_with_the_adapters_logits(
    tmp_path: Path, tie: bool
) -> None:
    model = prepare_model(with_lora(tiny_hybrid(0, tie=tie)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = logits(model)
    export_merged(model, tmp_path / "merged")
    code = (
        "import sys, torch\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()\n"
        "assert 'octopus_trl' not in sys.modules and 'peft' not in sys.modules\n"
        "ids = torch.arange(40)[None] * 7 % 97\n"
        "torch.save(model(input_ids=ids).logits.detach(), sys.argv[2])\n"
    )
    out = tmp_path / "logits.pt"
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "merged"), str(out)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    found = torch.load(out)
    assert (found - expected).abs().max() < 1e-5
    assert (found - logits(tiny_hybrid(0, tie=tie))).abs().max() > 1e-2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_names_and_dtypes_are_those_of_the_plain_model() -> None:
    plain = tiny_dense(0).to(torch.bfloat16)
    shapes = {name: (value.shape, value.dtype) for name, value in plain.state_dict().items()}
    state = merged_state(with_lora(plain))
    assert {name: (value.shape, value.dtype) for name, value in state.items()} == shapes


def test_modules_that_were_trained_whole_are_exported_as_trained(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(tiny_dense(0), config)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    export_merged(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (logits(loaded) - logits(model)).abs().max() < 1e-5


def test_a_model_without_an_adapter_is_written_as_it_is(tmp_path: Path) -> None:
    model = prepare_model(tiny_hybrid(0))
    export_merged(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(model))


def test_an_adapter_that_is_no_sum_of_weights_is_refused_by_name() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(ConfigError, match="DoRA"):
        merged_state(get_peft_model(tiny_dense(0), config))


def test_weights_that_are_split_over_ranks_are_refused_with_the_script_to_use() -> None:
    model = with_lora(tiny_dense(0))
    next(model.get_base_model().parameters()).ds_id = 0
    with pytest.raises(ConfigError, match="scripts/export.py"):
        merged_state(model)


def test_the_script_merges_a_saved_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_lora(tiny_dense(0))
    model.save_pretrained(tmp_path / "adapter")
    tiny_dense(0).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    script = runpy.run_path(str(ROOT / "scripts/export.py"))
    argv = ["export.py", "--model", str(tmp_path / "base"), "--adapter", str(tmp_path / "adapter")]
    merged = tmp_path / "merged"
    monkeypatch.setattr(sys, "argv", [*argv, "--output", str(merged)])
    script["main"]()
    assert capsys.readouterr().out.strip().endswith("merged")
    loaded = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    again = PeftModel.from_pretrained(tiny_dense(0), str(tmp_path / "adapter"))
    assert (logits(loaded) - logits(again)).abs().max() < 1e-5
    assert (merged / "tokenizer.json").is_file()
    monkeypatch.setattr(sys, "argv", [*argv[:-1], str(tmp_path / "none"), "--output", str(merged)])
    with pytest.raises(ConfigError, match="--adapter="):
        script["main"]()
