"""Draw the validation ids of OpenResearcher by their rule and write them to be published.

    python scripts/split_open_researcher.py --output data/open_researcher/validation.json
    python scripts/split_open_researcher.py --source FOLDER --against browsecomp-plus --output FILE

The file holds ids, the rule and hashes, no question and no answer. `--against` counts what the
questions share with a benchmark (equal questions, runs of 13 words).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from octopus_trl.eval.benchmarks.choice import BENCHMARKS, load_benchmark, read_options
from octopus_trl.eval.benchmarks.open_researcher import (
    CONFIGS,
    NUM_VALIDATION,
    QUESTIONS,
    load_open_researcher,
    validation_record,
)
from octopus_trl.files import write_whole
from octopus_trl.report.ending import ending


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--source", default=QUESTIONS, help="hub name, its download, or a file")
    add("--config", default=CONFIGS[0], help="of the hub; each has every question")
    add("--count", type=int, default=NUM_VALIDATION, help="ids to hold out")
    add("--against", choices=list(BENCHMARKS), help="benchmark to compare with")
    add("--against-source", help="where that one is; its own default if not given")
    add("--loader-options", nargs="*", default=[], metavar="KEY=VALUE", help="of that one")
    add("--output", type=Path, required=True, help="JSON file to write")
    asked = parser.parse_args()
    held_out = None
    if asked.against is not None:
        options = read_options(asked.loader_options)
        held_out = load_benchmark(asked.against, asked.against_source, **options)
    whole = load_open_researcher(asked.source, part="all", config=asked.config)
    record = validation_record(whole, held_out, asked.count)
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(asked.output, json.dumps(record, indent=1) + "\n")
    print(f"{len(record['qids'])} of {len(whole)} ids: {asked.output}")


if __name__ == "__main__":
    with ending(disk="nothing was written", stopped="nothing was written"):
        main()
