"""How a script starts: its arguments, its model and its output folder, each fault one error."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils.logging import disable_progress_bar
from trl import TrlParser

from octopus_trl.errors import ConfigError
from octopus_trl.models import prepare_model
from octopus_trl.train.config import parse_mount_layers


class RecipeParser(TrlParser):
    """TRL's parser whose every fault is a `ConfigError`, in place of an exit after its usage."""

    def __init__(self, kinds: Sequence[type]) -> None:
        super().__init__(tuple(kinds), allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message}; --help lists every setting")

    def set_defaults_with_config(self, **config: Any) -> list[str]:
        """Take a recipe's values, held to the kinds and choices that the command line has too.

        Raises:
            ConfigError: a value is no number where one belongs, or none of its choices.
        """
        for action in self._actions:
            value = config.get(action.dest)
            if action.nargs is None and action.type in (int, float) and type(value) in (bool, list):
                raise ConfigError(f"{action.dest}={value!r}: must be one number")
            # A bare `no` is false in YAML, and lists are several choices.
            if action.choices and isinstance(value, str) and value not in action.choices:
                known = ", ".join(str(choice) for choice in action.choices)
                raise ConfigError(f"{action.dest}={value!r}: must be one of {known}")
        rest: list[str] = super().set_defaults_with_config(**config)
        return rest


def read_arguments(kinds: Sequence[type], extra: Sequence[str] = ()) -> Any:
    """Read recipe and command line into one object of each kind.

    Args:
        extra: words behind those of the command line.
    Raises:
        ConfigError: the recipe cannot be read, or has a key or a value that is refused.
    """
    parser = RecipeParser(kinds)
    if sys.argv[-1] == "--config":
        raise ConfigError("--config: names no file; put a recipe behind it")
    try:
        return parser.parse_args_and_config([*sys.argv[1:], *extra])
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"--config {error.filename}: {error.strerror}") from None
    except yaml.YAMLError as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"--config: not YAML, {text}; correct the file") from None
    except ValueError as error:
        raise ConfigError(_explain(str(error), parser)) from None
    except TypeError as error:
        raise ConfigError(f"a setting is of the wrong type: {error}; see docs/config.md") from error


def hush_libraries(*, bars: bool = True) -> None:
    """Keep off the console what libraries tell developers, and bars that no terminal draws.

    Args:
        bars: let progress bars of loading stand where the console is a terminal.
    """
    # They announce the renames of a later version at every call.
    theirs = r"(transformers|trl|torch\.distributed)\."
    warnings.filterwarnings("ignore", category=FutureWarning, module=theirs)
    # It comes with an import, also where DeepSpeed is not asked for anything.
    logging.getLogger("DeepSpeed").addFilter(
        lambda record: "Setting accelerator to CPU" not in record.getMessage()
    )
    if not (bars and sys.stderr.isatty()):
        disable_progress_bar()


def load_pretrained(load: Callable[..., Any], setting: str, name: str, **options: Any) -> Any:
    """Load a model, an adapter or a tokenizer.

    Args:
        load: a `from_pretrained`, its arguments before `name` bound.
        setting: what the user calls `name`.
    Raises:
        ConfigError: there is none of that name, or its files are broken.
    """
    try:
        return load(name, **options)
    except ConfigError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        place = "" if Path(name).is_dir() else "no such folder, and not found as a hub model: "
        raise ConfigError(
            f"{setting}={name}: {place}{first_line(error)}; name a folder with config, weights and "
            "tokenizer, or a hub model"
        ) from None


def load_policy(model: str, adapter: str | None = None, recipe: str | None = None) -> Any:
    """Load a prepared policy for drawing, on the GPU in bfloat16 if there is one.

    Args:
        model: folder or hub name, the setting `--model`.
        adapter: folder or hub name of a LoRA adapter on it, the setting `--adapter`.
        recipe: YAML file whose `mount_layers` hold, which a dense model needs; the setting
            `--recipe`.
    Raises:
        ConfigError: there is none of that name, its files are broken, its class has no mixers, or
            the mount layers do not fit it.
    """
    layers = "attention" if recipe is None else _mount_layers_of(recipe)
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    policy = load_pretrained(AutoModelForCausalLM.from_pretrained, "--model", model, dtype=dtype)
    if adapter:
        policy = load_pretrained(partial(PeftModel.from_pretrained, policy), "--adapter", adapter)
    return prepare_model(policy.to("cuda" if on_gpu else "cpu"), mount_layers=layers).eval()


def _mount_layers_of(recipe: str) -> Any:
    """Read the mount layers of a recipe, "attention" where it names none.

    Raises:
        ConfigError: the file cannot be read, or its layers cannot.
    """
    try:
        read = yaml.safe_load(Path(recipe).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--recipe {recipe}: cannot be read ({error})") from error
    named = read.get("mount_layers", "attention") if isinstance(read, dict) else "attention"
    return parse_mount_layers(named)


def read_json(path: str, setting: str) -> Any:
    """Read a JSON file that a setting names.

    Raises:
        ConfigError: no such file, or broken JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}={path}: no readable JSON file ({error})") from None


def make_output_folder(path: str | Path, setting: str = "output_dir") -> Path:
    """Make the folder that a run writes to, before anything is computed.

    Raises:
        ConfigError: it cannot be made, or nothing can be written there.
    """
    if not str(path):
        raise ConfigError(f"{setting} is empty: name a folder")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"{setting}={path}: cannot be written ({error.strerror}); name another folder"
        ) from None
    return Path(path)


def check_report_to(names: str | Sequence[str]) -> None:
    """Refuse a tracker that is unknown or not installed.

    Raises:
        ConfigError: says which are known, or what to install.
    """
    try:
        for callback in get_reporting_integration_callbacks(names):
            callback()
    except (ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(
            f"report_to={names}: {first_line(error)}; report_to: none needs nothing"
        ) from None


def first_line(error: BaseException) -> str:
    """Give the first line of another library's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")


def _explain(message: str, parser: TrlParser) -> str:
    """Say of a parser's message about unknown keys which known ones they resemble."""
    if "Unknown arguments" not in message and "not used by the HfArgumentParser" not in message:
        return message
    known = [action.dest for action in parser._actions]
    words = [part.strip("'\"[],") for part in message[message.index("[") :].split()]
    hints = []
    for key in (word[2:].partition("=")[0] for word in words if word.startswith("--")):
        close = get_close_matches(key, known, n=1)
        hints.append(f"{key}" + (f" (did you mean {close[0]}?)" if close else ""))
    if not hints:
        return f"words that belong to no setting: {' '.join(words)}; remove them"
    return f"unknown settings: {', '.join(hints)}"
