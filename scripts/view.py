"""Write one episode as one HTML page that needs no other file.

python scripts/view.py runs/eval-late/traces.jsonl --tokenizer data/policy/tiny-hybrid \
    --output episode.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from octopus_trl.errors import ConfigError
from octopus_trl.report.ending import ending
from octopus_trl.report.episode import Decode, write_episode
from octopus_trl.trace import Trace
from octopus_trl.trace_files import read_traces


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="file of traces, a JSON line an episode")
    parser.add_argument("--episode", help="episode_id; the first of the file by default")
    parser.add_argument("--tokenizer", help="folder of the policy; token ids are shown without it")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a KV page")
    parser.add_argument("--output", type=Path, default=Path("episode.html"))
    asked = parser.parse_args()
    trace = pick(asked.trace, asked.episode)
    decode = decoder(asked.tokenizer) if asked.tokenizer else None
    write_episode(trace, asked.output, decode=decode, page_size=asked.page_size)
    print(f"{asked.output}: {trace!r}")


def pick(path: Path, episode: str | None) -> Trace:
    """Give an episode of a file.

    Raises:
        ConfigError: there is no such file, or no such episode in it.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the traces.jsonl of a run or an evaluation")
    near: list[str] = []
    for trace in read_traces(path):
        if episode is None or trace.episode_id == episode:
            return trace
        near.append(trace.episode_id)
    if not near:
        raise ConfigError(f"{path}: holds no episode")
    shown = ", ".join(near[:5])
    raise ConfigError(f"{path}: has no episode {episode!r}; of its {len(near)}, first: {shown}")


def decoder(folder: str) -> Decode:
    """Load a tokenizer and give its decoding, control tokens shown as text."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer {folder}: cannot be loaded ({error})") from error
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))


if __name__ == "__main__":
    with ending():
        main()
