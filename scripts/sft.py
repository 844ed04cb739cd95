"""Warm-start a small hybrid on drills and expert traces of the seal join world.

    python scripts/sft.py --config recipes/tiny-hybrid/sft/config_1.yaml

Writes the model, tokenizer and log to `output_dir`; killed and started again with
`--resume_from_checkpoint true` it goes on with the rows that would have come next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octopus_trl.report.ending import ending, importing

with importing():
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    from octopus_trl import prepare_model
    from octopus_trl.eval.seal_join_backend import load_world
    from octopus_trl.eval.seal_join_mixture import SealJoinMixture
    from octopus_trl.eval.seal_join_tokenizer import build_tokenizer
    from octopus_trl.models.decay import initialise_decay
    from octopus_trl.train.checkpoint import resolve
    from octopus_trl.train.sft import (
        OctopusSFTConfig,
        OctopusSFTTrainer,
        RowDataset,
    )
    from octopus_trl.train.startup import (
        check_report_to,
        hush_libraries,
        load_pretrained,
        make_output_folder,
        read_arguments,
        read_json,
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
    hush_libraries()
    script, args = read_arguments((ScriptArguments, OctopusSFTConfig))
    make_output_folder(args.output_dir)
    resume = resolve(args.resume_from_checkpoint, args.output_dir)
    check_report_to(args.report_to)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(args.seed)
    if script.init_from:
        model = load_pretrained(
            AutoModelForCausalLM.from_pretrained, "init_from", script.init_from, dtype=torch.float32
        )
    else:
        settings = read_json(script.model_config, "model_config")
        settings.pop("model_type", None)
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings))
        if args.decay_log_uniform:
            initialise_decay(model, seed=args.seed)
    prepare_model(model)
    tokenizer = build_tokenizer()
    stages = read_json(script.curriculum, "curriculum")
    mixture = SealJoinMixture(load_world(script.world, snippet_tokens=0), tokenizer, stages)
    rows = RowDataset(
        mixture, num_rows=args.max_steps, pack_tokens=args.pack_tokens, seed=args.seed
    )
    trainer = OctopusSFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(args.output_dir)
    trainer.save_state()
    trainer.create_model_card()
    if args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    with ending():
        main()
