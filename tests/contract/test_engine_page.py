"""The example of docs/engine.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.engine.counters import REASONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")


def test_the_example_of_the_engine_page_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(compile(example, "docs/engine.md", "exec"), names)
    assert capsys.readouterr().out.startswith("[8, 8] {'fork': 0, 'mount': 0, 'rewind': 0")
    assert names["engine"].stats()["mounts"] == 1
    names["engine"].check_integrity()


def test_the_engine_page_names_every_reason_of_a_miss() -> None:
    table = PAGE.split("## Counters")[1]
    assert set(re.findall(r"`(\w+)`", table)) >= set(REASONS)
