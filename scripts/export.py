"""Merge a LoRA adapter into its model and write plain weights.

    python scripts/export.py --model Qwen/Qwen3.5-4B --adapter runs/MINE --output runs/MINE-merged

`AutoModelForCausalLM.from_pretrained` loads the result without this package or PEFT.
"""

from __future__ import annotations

import argparse
from functools import partial

from octopus_trl.report.ending import ending, importing

with importing():
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from octopus_trl.train.export import export_merged
    from octopus_trl.train.startup import hush_libraries, load_pretrained, make_output_folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub name of the base model")
    parser.add_argument("--adapter", required=True, help="folder of the LoRA adapter")
    parser.add_argument("--output", required=True, help="folder for the merged model")
    parser.add_argument("--dtype", default="auto", help="of the weights; auto keeps the model's")
    asked = parser.parse_args()
    hush_libraries()
    model = load_pretrained(
        AutoModelForCausalLM.from_pretrained, "--model", asked.model, dtype=asked.dtype
    )
    model = load_pretrained(partial(PeftModel.from_pretrained, model), "--adapter", asked.adapter)
    tokenizer = load_pretrained(AutoTokenizer.from_pretrained, "--model", asked.model)
    make_output_folder(asked.output, "--output")
    print(export_merged(model, asked.output, tokenizer))


if __name__ == "__main__":
    with ending(disk="the folder is not whole: remove it"):
        main()
