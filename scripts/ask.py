"""Ask a policy one question over a corpus and watch its threads.

python scripts/ask.py --model MODEL --data FOLDER "Who kept the north gate in winter?"
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.live import Live
from transformers import AutoTokenizer

from octopus_trl import Engine, EpisodeRunner
from octopus_trl.agent.backend_choice import BACKENDS, open_backend
from octopus_trl.agent.config import RolloutConfig
from octopus_trl.agent.search import token_ends
from octopus_trl.errors import ConfigError, OctopusError
from octopus_trl.eval.policy_settings import rollout_settings
from octopus_trl.report.growing import GrowingTree
from octopus_trl.trace_files import write_traces
from octopus_trl.train.startup import load_policy, load_pretrained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("question")
    parser.add_argument("--model", default="data/policy/tiny-hybrid", help="folder or hub name")
    parser.add_argument("--adapter", help="folder or hub name of a LoRA adapter on it")
    parser.add_argument("--recipe", help="take rollout settings from a recipe of recipes/")
    parser.add_argument("--data", help="folder with corpus.jsonl, of the backend bm25")
    parser.add_argument("--backend", choices=BACKENDS, help="bm25, or one of the others")
    parser.add_argument("--search-url", help="an OpenSearch server; OPENSEARCH_PASSWORD")
    parser.add_argument("--index", help="index on that server, or folder of a Lucene index")
    parser.add_argument("--search-user", help="of that server")
    parser.add_argument("--k1", type=float, default=0.9)
    parser.add_argument("--b", type=float, default=0.4)
    parser.add_argument("--snippet-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, help="of the recipe, or 1, if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, help="keep the episode there, for scripts/view.py")
    asked = parser.parse_args()
    if not asked.question.strip():
        raise ConfigError("the question is empty: give one in quotes")
    given = {"temperature": asked.temperature}
    settings = rollout_settings(world=False, recipe=asked.recipe, given=given)
    config = RolloutConfig(**settings)
    tokenizer = load_pretrained(AutoTokenizer.from_pretrained, "--model", asked.model)
    if asked.data is None and asked.index is None:
        raise ConfigError("--data is missing: name a folder with corpus.jsonl, or give --index")
    corpus = open_backend(
        asked.backend,
        asked.data or "",
        url=asked.search_url,
        index=asked.index,
        user=asked.search_user,
        k1=asked.k1,
        b=asked.b,
        snippet_tokens=asked.snippet_tokens,
        ends=token_ends(tokenizer),
        page_tokens=config.page_tokens,
    )
    runner = EpisodeRunner(
        Engine(load_policy(asked.model, asked.adapter, asked.recipe), page_size=16),
        tokenizer,
        corpus,
        config,
    )
    grown = GrowingTree(asked.question)
    console = Console(highlight=False)
    with Live(grown.tree, console=console, refresh_per_second=4, vertical_overflow="visible"):
        (trace,) = runner.run(
            [{"id": "ask", "question": asked.question}],
            seed=asked.seed,
            on_event=lambda _, event: grown.feed(event),
        )
        # The last events come with the episode's end, after which nothing is told any more.
        told = GrowingTree(asked.question)
        for event in trace.events:
            told.feed(event)
        grown.tree.children[:] = told.tree.children
    if asked.trace is not None:
        write_traces(asked.trace, [trace])
    answer = trace.meta.get("result")
    print(answer if answer is not None else "no answer: the root ended without a commit")


if __name__ == "__main__":
    try:
        main()
    except OctopusError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: {error}; the episode is not kept", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped; nothing is kept", file=sys.stderr)
        sys.exit(130)
