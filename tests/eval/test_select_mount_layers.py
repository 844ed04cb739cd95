"""The command finds the planted layer of a saved model and writes the line into a recipe."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from scripts import select_mount_layers
from tests.agent.fakes import byte_tokenizer
from tests.eval.planted import planted_model

LAYER = 1
CAPITALS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers a blank with the capital that it sees, its tokenizer, and probes."""
    folder = tmp_path_factory.mktemp("planted")
    tokenizer = byte_tokenizer()
    (blank,) = tokenizer.encode(" ", add_special_tokens=False)
    capitals = tokenizer.encode(CAPITALS, add_special_tokens=False)
    model = planted_model({LAYER: ((blank,), capitals)}, vocab_size=len(tokenizer), layers=3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    draw = random.Random(0)
    lines = [
        {"text": f"the {draw.choice(CAPITALS)} is", "question": "which", "answer": "?", "own": "so"}
        for _ in range(8)
    ]
    for line in lines:
        line["answer"] = line["text"].split()[1]
    (folder / "probes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: Any) -> None:
    given = ["--model", folder, "--probes", folder / "probes.jsonl", *words]
    monkeypatch.setattr("sys.argv", ["select_mount_layers.py", *map(str, given)])
    select_mount_layers.main()


def test_the_planted_layer_is_printed_kept_and_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    tmp_path: Path,
) -> None:
    out, recipe = tmp_path / "new" / "layers.json", tmp_path / "config.yaml"
    recipe.write_text("model_name_or_path: mine\nseed: 3\n")
    run(monkeypatch, folder, "--out", out, "--recipe", recipe)
    printed = capsys.readouterr().out
    assert f"mount_layers: [{LAYER}]" in printed.splitlines()
    assert "one layer alone" in printed
    lines = recipe.read_text().splitlines()
    assert lines == ["model_name_or_path: mine", f"mount_layers: [{LAYER}]", "seed: 3"]
    result = json.loads(out.read_text())
    assert result["mount_layers"] == [LAYER]
    assert result["held_out"]["value"] > 0.9
    assert result["held_out"]["n"] == 4
    assert {tuple(each["layers"]) for each in result["alone"]} == {(0,), (1,), (2,)}
    assert result["nll_full_text"] < result["nll_without"]

    # Everything that was chosen on is on disk: only the held-out probes are scored again.
    calls: list[int] = []
    real = select_mount_layers.score_last

    def counted(model: Any, traces: Any) -> Any:
        calls.append(len(traces))
        return real(model, traces)

    monkeypatch.setattr(select_mount_layers, "score_last", counted)
    run(monkeypatch, folder, "--out", out)
    assert len(calls) == 3
    assert json.loads(out.read_text())["alone"] == result["alone"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("-n", "3"), "-n 3: must be at least 4"),
        (("--max-layers", "0"), "max_layers=0"),
        (("--target", "1.5"), "target=1.5"),
        (("--layers", "0,9"), "must be among the attention layers"),
        (("--layers", "some"), "must be attention, all, or indices"),
        (("--recipe", "/none/config.yaml"), "cannot be read"),
        (("--model", "/none/model"), "no such folder"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, folder: Path, words: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(select_mount_layers.ConfigError, match=reason):
        run(monkeypatch, folder, *words)
