"""The names that users import (DESIGN §6) exist, load lazily and keep their signatures."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import octopus_trl

ROOT = Path(__file__).parents[2]

PUBLIC = {
    "Cursor",
    "Engine",
    "EpisodeRunner",
    "OctopusGRPOConfig",
    "OctopusGRPOTrainer",
    "RolloutConfig",
    "SamplingParams",
    "Trace",
    "TraceError",
    "prepare_model",
    "score_traces",
}

# name -> parameters, `*` before the keyword-only ones
PARAMETERS = {
    "prepare_model": ["model", "*", "mount_layers"],
    "score_traces": ["model", "traces", "*", "mounts", "temperature"],
    "Engine": ["model", "*", "page_size", "num_pages", "num_states", "device"],
    "Engine.open": ["self", "tokens"],
    "Engine.fork": ["self", "cursor"],
    "Engine.extend": ["self", "cursor", "tokens"],
    "Engine.mount": ["self", "cursor", "source", "since"],
    "Engine.rewind": ["self", "cursor", "num_tokens"],
    "Engine.logits": ["self", "cursor"],
    "Engine.close": ["self", "cursor"],
    "Engine.generate": ["self", "cursors", "sampling", "*", "until"],
    "Engine.stats": ["self"],
    "Engine.check_integrity": ["self"],
    "Engine.sleep": ["self"],
    "Engine.wake": ["self"],
    "EpisodeRunner": ["engine", "tokenizer", "tools", "config"],
    "EpisodeRunner.run": ["self", "examples", "*", "group_size", "seed"],
    "Trace.to_dict": ["self"],
    "Trace.linearize": ["self", "segment_id"],
}
DEFAULTS: dict[str, dict[str, object]] = {
    "prepare_model": {"mount_layers": "attention"},
    "score_traces": {"mounts": "live", "temperature": 1.0},
    "Engine": {"num_pages": None, "num_states": None, "device": None},
    "Engine.mount": {"since": None},
}


def parameters(function: object) -> list[str]:
    """Name the parameters of a callable in order, `*` standing before the keyword-only ones."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return names


def resolve(dotted: str) -> object:
    value: object = octopus_trl
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def test_public_names_are_exactly_the_contract() -> None:
    assert set(octopus_trl.__all__) == PUBLIC
    assert set(dir(octopus_trl)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_loads(name: str) -> None:
    assert getattr(octopus_trl, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Octopus'"):
        _ = octopus_trl.Octopus


def test_version_is_that_of_the_project_file() -> None:
    assert f'version = "{octopus_trl.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, octopus_trl; octopus_trl.Trace; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_public_signature_is_the_contract_and_more_only_by_keyword(name: str) -> None:
    found, agreed = parameters(resolve(name)), PARAMETERS[name]
    assert found[: len(agreed)] == agreed
    every = inspect.signature(resolve(name)).parameters  # type: ignore[arg-type]
    for extra in set(found) - {*agreed, "*"}:
        assert every[extra].kind is inspect.Parameter.KEYWORD_ONLY, extra
        assert every[extra].default is not inspect.Parameter.empty, extra


@pytest.mark.parametrize(
    ("name", "parameter", "default"),
    [(name, key, value) for name, each in DEFAULTS.items() for key, value in each.items()],
)
def test_public_default_is_the_contract(name: str, parameter: str, default: object) -> None:
    signature = inspect.signature(resolve(name))  # type: ignore[arg-type]
    assert signature.parameters[parameter].default == default
