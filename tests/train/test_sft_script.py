"""`scripts/sft.py`: what it refuses, and where it goes on."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from octopus_trl.errors import ConfigError

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/sft.py"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--pack_tokns", "9"], r"pack_tokns \(did you mean pack_tokens\?\)"),
        (["--init_from", "/no/model"], "init_from=/no/model: no such folder"),
        (["--model_config", "/no/file"], "model_config=/no/file: no readable JSON"),
        (["--curriculum", "/no/file"], "curriculum=/no/file: no readable JSON"),
        (["--world", "/no/world"], "/no/world/world.json: no readable world"),
        (["--resume_from_checkpoint", "true"], "no whole checkpoint under"),
        (["--resume_from_checkpoint", "/no/one"], "there is no such folder"),
    ],
    ids=lambda value: value[0] + value[1] if isinstance(value, list) else None,
)
def test_a_wrong_argument_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], says: str
) -> None:
    monkeypatch.chdir(ROOT)
    given = ["--use_cpu", "true", "--bf16", "false", "--max_steps", "1", "--report_to", "none"]
    given += ["--per_device_train_batch_size", "1", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["sft.py", *given, *words])
    with pytest.raises(ConfigError, match=says):
        SCRIPT["main"]()
