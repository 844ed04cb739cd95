"""Warm-start a small hybrid on drills and expert traces of the seal join world.

    python scripts/sft.py --config recipes/tiny-hybrid/sft/config_1.yaml

Writes the model, tokenizer and log to `output_dir`; killed and started again with
`--resume_from_checkpoint true` it goes on with the rows that would have come next.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from trl import TrlParser

from octopus_trl import prepare_model
from octopus_trl.errors import OctopusError
from octopus_trl.eval.seal_join_backend import load_world
from octopus_trl.eval.seal_join_mixture import SealJoinMixture
from octopus_trl.eval.seal_join_tokenizer import build_tokenizer
from octopus_trl.train.sft import (
    OctopusSFTConfig,
    OctopusSFTTrainer,
    RowDataset,
    initialise_decay,
)


@dataclass
class ScriptArguments:
    """What is trained on what."""

    model_config: str = field(
        default="recipes/tiny-hybrid/model.json",
        metadata={"help": "JSON of a Qwen3_5TextConfig; the weights start at random."},
    )
    init_from: str | None = field(
        default=None,
        metadata={"help": "Folder of a model to go on from, instead of random weights."},
    )
    world: str = field(
        default="data/seal_join", metadata={"help": "Folder that scripts/build_world.py wrote."}
    )
    curriculum: str = field(
        default="recipes/tiny-hybrid/sft/curriculum_1.json",
        metadata={"help": "Stages of the run: weight of each kind of trace up to a progress."},
    )


def main() -> None:
    parser = TrlParser((ScriptArguments, OctopusSFTConfig))
    script, args = parser.parse_args_and_config()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(args.seed)
    if script.init_from:
        model = AutoModelForCausalLM.from_pretrained(script.init_from, dtype=torch.float32)
    else:
        settings = json.loads(Path(script.model_config).read_text())
        settings.pop("model_type", None)
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings))
        if args.decay_log_uniform:
            initialise_decay(model, seed=args.seed)
    prepare_model(model)
    tokenizer = build_tokenizer()
    stages = json.loads(Path(script.curriculum).read_text())
    mixture = SealJoinMixture(load_world(script.world, snippet_tokens=0), tokenizer, stages)
    rows = RowDataset(
        mixture, num_rows=args.max_steps, pack_tokens=args.pack_tokens, seed=args.seed
    )
    trainer = OctopusSFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    trainer.save_state()


if __name__ == "__main__":
    try:
        main()
    except OctopusError as error:
        sys.exit(f"error: {error}")
