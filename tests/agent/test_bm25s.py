"""Importing bm25s must not start jax, which takes the GPU that a model needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STARTED = 'raise RuntimeError("Unable to initialize backend cuda")'


@pytest.mark.parametrize("first", ["", "import jax.lax"])
def test_jax_is_not_started_and_stays_usable(tmp_path: Path, first: str) -> None:
    package = tmp_path / "jax"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lax.py").write_text(f"def top_k(scores, k):\n    {STARTED}\n")
    code = f"""
{first}
from octopus_trl.agent.search import Bm25Backend
import jax.lax, bm25s
assert not bm25s.selection_np.JAX_IS_AVAILABLE
assert jax.lax.top_k
"""
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
