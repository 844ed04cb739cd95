"""A process that has imported everything once and forks the ranks of whatever run it is asked for.

Reads one request a line, `{"scene", "folder", "given"}`, and answers each with `answer: ` and what
went wrong, null where nothing did.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch

from tests.train import (
    bytes_worker,
    equal_worker,
    failing_worker,
    generating_worker,
    killed_worker,
)
from tests.train.forks import DEEPSPEED
from tests.train.runs import tokenizer

SCENES = {
    "bytes": bytes_worker.main,
    "equal": equal_worker.main,
    "failing": failing_worker.main,
    "generating": generating_worker.main,
    "killed": killed_worker.main,
}


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    warm_up()
    for line in sys.stdin:
        asked = json.loads(line)
        error = None
        try:
            SCENES[asked["scene"]](Path(asked["folder"]), *asked["given"])
        except SystemExit as end:
            error = str(end.code)
        except Exception:
            error = traceback.format_exc()
        answers.write(f"answer: {json.dumps(error)}\n")
        answers.flush()


def warm_up() -> None:
    """Do once what every rank would do again: late imports, the tokenizer, a sweep of garbage."""
    tokenizer()
    if DEEPSPEED:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # brings a compiler
        importlib.import_module("deepspeed.runtime.zero.stage3")
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
