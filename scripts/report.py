"""Draw reward, branching, lengths and divergence of training runs.

python scripts/report.py runs/tiny-hybrid-grpo-learn --output report
"""

from __future__ import annotations

import argparse
from pathlib import Path

from octopus_trl.report.curves import write_report
from octopus_trl.report.ending import ending
from octopus_trl.report.runs import read_run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", type=Path, help="output_dir of a run")
    parser.add_argument("--output", type=Path, default=Path("report"), help="folder")
    parser.add_argument("--window", type=int, default=10, help="steps of the moving mean")
    asked = parser.parse_args()
    runs = [read_run(folder) for folder in asked.run]
    for path in write_report(runs, asked.output, window=asked.window):
        print(path)


if __name__ == "__main__":
    with ending(disk="a file is whole if its path was printed"):
        main()
