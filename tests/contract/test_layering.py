"""Imports go one way (DESIGN §7): what a layer may import of ours, and what it may never import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.imports import imported_modules

ROOT = Path(__file__).parents[2]
TOP = "octopus_trl"

GROUND = {"shapes", "errors"}
ONE_LAYER = {"trace_rules": "trace", "trace_files": "trace"}  # files that belong to another's layer
TRAINING_TOOLS = {"trl", "accelerate", "deepspeed", "peft", "datasets"}
KERNEL_TOOLS = {"triton", "fla", "flash_attn", "tilelang", "cutlass"}

# layer -> what it may import of ours; a dotted entry allows that one module of a package.
MAY_IMPORT: dict[str, set[str]] = {
    "shapes": set(),
    "errors": set(),
    "files": set(),
    "maths": GROUND,
    "kernels": GROUND | {"maths"},
    "models": GROUND | {"maths", "kernels", "trace"},
    "trace": {"errors", "files", "maths.dag", "trace_rules"},
    "trace_rules": {"errors", "maths.dag", "trace"},
    "trace_files": {"errors", "files", "trace"},
    "protocols": {"errors", "trace"},
    "engine": GROUND | {"maths", "kernels", "models", "protocols"},
    "agent": {"errors", "files", "trace", "trace_files", "protocols"},
    "eval": {"errors", "files", "maths.dag", "trace", "trace_files", "protocols", "agent"},
    "report": {"errors", "files", "trace", "trace_files", "protocols", "eval"},
    "train": GROUND
    | {"files", "maths", "kernels", "models", "trace", "trace_files", "protocols"}
    | {"engine", "agent"},
}
# layer or module -> third parties that it may not import
MAY_NOT_IMPORT: dict[str, set[str]] = {
    "maths.dag": {"torch", "transformers"},
    "files": {"torch", "transformers"},
    "trace": {"torch", "transformers"},
    "trace_rules": {"torch", "transformers"},
    "trace_files": {"torch", "transformers"},
    "protocols": {"torch", "transformers"},
    "maths": KERNEL_TOOLS | TRAINING_TOOLS | {"transformers"},
    "kernels": TRAINING_TOOLS | {"transformers"},
    "models": {"trl", "accelerate", "deepspeed"},
    "engine": TRAINING_TOOLS | {"tokenizers"},
    "agent": TRAINING_TOOLS | KERNEL_TOOLS | {"torch"},
    "eval": (TRAINING_TOOLS - {"datasets"}) | KERNEL_TOOLS | {"torch"},
}


def layering_faults(root: Path) -> list[str]:
    """List the imports under `root` that the two tables do not allow, as `file:line: why`."""
    faults = []
    for path in sorted((root / TOP).rglob("*.py")):
        inner = path.relative_to(root / TOP).with_suffix("").parts
        layer = ONE_LAYER.get(inner[0], inner[0])
        if layer == "__init__":
            continue
        if layer not in MAY_IMPORT:
            faults.append(f"{path.relative_to(root)}: layer {layer!r} has no row in MAY_IMPORT")
            continue
        banned = MAY_NOT_IMPORT.get(layer, set()) | MAY_NOT_IMPORT.get(".".join(inner), set())
        for line, name in imported_modules(path, root=root):
            where = f"{path.relative_to(root)}:{line}"
            head, _, rest = name.partition(".")
            target, _, inside = rest.partition(".")
            target = ONE_LAYER.get(target, target)
            if head in banned:
                faults.append(f"{where}: {layer} may not import {head}")
            if head != TOP:
                continue
            if target not in MAY_IMPORT:
                faults.append(f"{where}: import {rest or TOP!r} from the module that defines it")
            elif target != layer and not any(
                f"{target}.{inside}.".startswith(f"{allowed}.") for allowed in MAY_IMPORT[layer]
            ):
                faults.append(f"{where}: {layer} may not import {rest}")
    return faults


def test_imports_go_one_way() -> None:
    faults = layering_faults(ROOT)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("maths/paging.py", "from octopus_trl.engine.pages import PagePool", "engine.pages"),
        ("maths/dag.py", "def f():\n    import torch", "may not import torch"),
        ("agent/tools.py", "from octopus_trl import engine", "may not import engine"),
        ("agent/tools.py", "import torch.nn", "may not import torch"),
        ("trace.py", "from octopus_trl.maths import attention", "maths.attention"),
        ("engine/batch.py", "from ..train.config import X", "train.config"),
        ("engine/batch.py", "from octopus_trl import Trace", "module that defines it"),
        ("engine/batch.py", "from octopus_trl.files import write_whole", "may not import files"),
        ("helpers/misc.py", "", "no row"),
    ],
)
def test_a_wrong_import_is_reported(tmp_path: Path, file: str, source: str, fault: str) -> None:
    path = tmp_path / TOP / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert fault in "\n".join(layering_faults(tmp_path))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("trace.py", "from octopus_trl.maths import dag\nfrom octopus_trl.maths.dag import starts"),
        ("engine/batch.py", "from .pages import PagePool\nimport octopus_trl.models.patch"),
        ("train/trainer.py", "import trl\nfrom octopus_trl.agent.rollout import EpisodeRunner"),
    ],
)
def test_an_allowed_import_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / TOP / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert layering_faults(tmp_path) == []


@pytest.mark.parametrize(
    "module", ["trace", "trace_files", "protocols", "maths.dag", "agent.episode"]
)
def test_reading_records_loads_no_torch(module: str) -> None:
    code = f"import sys, {TOP}.{module}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
