"""Every figure that a run logs, in one table: `python -m octopus_trl.train.metrics` writes it.

Figures of an evaluation carry `eval_` in front. Means over ranks are means over what they count
(tokens, episodes, seconds), not over ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"

# name -> (unit, meaning); a word in capitals stands for any name.
METRICS: dict[str, tuple[str, str]] = {
    "loss": ("-", "Mean over trees of the mean over their counted tokens of Eq. 9."),
    "grad_norm": ("-", "Norm of the gradient before clipping."),
    "learning_rate": ("-", "Of the optimizer step just taken."),
    "epoch": ("-", "Passes over the questions."),
    "step": ("-", "Optimizer steps; the policy version of what is generated next."),
    "reward": ("reward", "Mean of the weighted rewards y; R = 2y − 1."),
    "reward_std": ("reward", "Standard deviation over the episodes of a generation."),
    "rewards/NAME/mean": ("reward", "Of one reward function."),
    "rewards/NAME/std": ("reward", "Of one reward function."),
    "rewards/missing": ("share", "Episodes that no function judged (None or NaN): no gradient."),
    "grader/exact": (
        "share",
        "Answers that exact match decided, right ones where a judge follows.",
    ),
    "grader/judge": ("share", "Answers that the judge decided."),
    "grader/judge_unparsed": ("share", "Answers whose judge's reply held no verdict: wrong."),
    "grader/judge_down": ("share", "Answers that no judge could be reached for: no reward."),
    "grader/no_answer": ("share", "Episodes without an answer: wrong."),
    "grader/no_gold": ("share", "Questions without a gold answer: no reward."),
    "frac_reward_zero_std": ("share", "Groups of equal rewards: no gradient from the outcome."),
    "advantage/mean": ("reward", "Over owned tokens, branch credit included."),
    "advantage/abs": ("reward", "Mean size over owned tokens."),
    "advantage/max_abs": ("reward", "Largest size."),
    "tree/z": ("tokens", "Z: counted tokens of a tree, what its loss is divided by."),
    "tree/z_max": ("tokens", "Of the largest tree."),
    "credit/change": ("nats or reward", "Mean Δ_b over branches."),
    "credit/clipped_share": (
        "share",
        "Branches whose score changed by more than the clip of 1 nat.",
    ),
    "credit/added_abs": ("reward", "Mean size of λ (Δ_b − mean Δ) over branches."),
    "credit/read_share": ("share", "Branches without which the root had seen other text."),
    "credit/scored_share": ("share", "Episodes with an answer to score; the others get none."),
    "episode/threads": ("threads", "Threads of an episode, the root counted."),
    "episode/branches": ("chains", "Leaf chains: threads and branches left by rewinds."),
    "episode/depth": ("forks", "Forks above the deepest thread."),
    "episode/forks": ("calls", "Children forked."),
    "episode/mounts": ("calls", "Reads that mounted something."),
    "episode/mounted_tokens": ("tokens", "Tokens that some thread read by a mount, each once."),
    "episode/rewinds": ("calls", "Places where a thread went back and wrote on."),
    "episode/turns": ("turns", "Sampled turns of all threads."),
    "episode/refused_calls": ("calls", "Tool calls that got an error text."),
    "episode/explored_tokens": ("tokens", "All tokens of an episode, rewound ones too (gross)."),
    "episode/active_tokens": ("tokens", "Those that no rewind has left."),
    "episode/prompt_tokens_a_turn": ("tokens", "What a turn sees before it: chain and mounts."),
    "episode/owned_tokens": ("tokens", "Sampled tokens."),
    "episode/committed": ("share", "Episodes whose root committed an answer."),
    "episode/truncated": ("share", "Episodes whose root did not."),
    "episode/failed_threads": ("threads", "Threads that an error ended."),
    "engine/prefilled": ("tokens", "Given tokens computed for the first time, a rank."),
    "engine/reused": ("tokens", "Given tokens that were in the pools already."),
    "engine/replayed": (
        "tokens",
        "Tokens stepped through again to rebuild a state, or for a reader's under a splice.",
    ),
    "engine/re_prefilled": ("tokens", "Given tokens computed again after an eviction."),
    "engine/decoded": ("tokens", "Sampled tokens."),
    "engine/decode_steps": ("passes", "Decode passes of the model."),
    "engine/prefill_passes": ("passes", "Prefill passes of the model."),
    "engine/forks": ("calls", "Forks of cursors, boundaries kept for readers too."),
    "engine/mounts": ("calls", "Mounts of cursors."),
    "engine/rewinds": ("calls", "Rewinds of cursors."),
    "engine/evicted_states": ("states", "Recurrent states dropped for want of a slot."),
    "engine/bytes_copied": (
        "bytes",
        "Copied by forks, mounts and rewinds; `position: rerotate` copies, nothing else does.",
    ),
    "engine/hit_rate": ("share", "What turns began after, chain and text, found in the pools."),
    "engine/peak_pages": ("pages", "Most pages held, since the run began."),
    "engine/peak_slots": ("slots", "Most state slots held, since the run began."),
    "engine/open_s": ("s", "In the engine's `open`; the parts overlap with `step`."),
    "engine/extend_s": ("s", "In `extend`."),
    "engine/step_s": ("s", "In `step`: prefill of tool text, decode, sampling."),
    "engine/fork_s": ("s", "In `fork`."),
    "engine/mount_s": ("s", "In `mount`."),
    "engine/rewind_s": ("s", "In `rewind`."),
    "engine/sleep_s": ("s", "Giving the pools' memory back before the update before."),
    "engine/wake_s": ("s", "Taking it again."),
    "packing/dedup_ratio": ("ratio", "r: tokens of leaf chains with mounts over unique tokens."),
    "packing/shared_tokens": ("tokens", "Tokens that packing saves an episode."),
    "packing/row_tokens": ("tokens", "Unique tokens of a packed row."),
    "packing/left_out": ("share", "Trees that fit in no row and were not trained on."),
    "rollout_kl/mean": ("nats", "e^d − 1 − d, d = training − rollout log-prob, before an update."),
    "rollout_kl/unmounted": ("nats", "On tokens that saw no mount and were not rewound."),
    "rollout_kl/mounted": ("nats", "On tokens that saw a mount and were not rewound."),
    "rollout_kl/rewound": ("nats", "On tokens of a branch that a rewind left."),
    "rollout_kl/after_rewind": ("nats", "On tokens that their thread wrote after a rewind."),
    "rollout_kl/max_abs": ("nats", "Largest |d|."),
    "kl": ("nats", "k3 divergence from the reference, where beta is not 0."),
    "ratio/mean": ("ratio", "p / p_old over owned tokens; 1 before the first update."),
    "ratio/max": ("ratio", "Largest."),
    "clip_ratio/low_mean": ("share", "Tokens clipped at 1 − epsilon."),
    "clip_ratio/high_mean": ("share", "Tokens clipped at 1 + epsilon_high."),
    "clip_ratio/region_mean": ("share", "Tokens clipped on either side."),
    "importance_weight/mean": ("ratio", "min(p_old / p_sampled, C) over owned tokens."),
    "importance_weight/capped": ("share", "Tokens at the cap C."),
    "importance_weight/max": ("ratio", "Largest."),
    "entropy_estimate": ("nats", "−mean sampling log-prob."),
    "speed/sampled_tokens_per_s": ("tokens/s", "Sampled tokens over generation time, a device."),
    "speed/train_tokens_per_s": ("tokens/s", "Unique packed tokens over update time, a device."),
    "speed/train_logical_tokens_per_s": ("tokens/s", "Leaf-chain tokens that these stand for."),
    "speed/train_tflops_per_s": ("TFLOP/s", "Model FLOPs of updates, a device (train/flops.py)."),
    "speed/mfu": ("share", "The same over the device's peak; absent where that is not known."),
    "memory/peak_gib": ("GiB", "Most device memory of a rank since the run began; CUDA only."),
    "memory/peak_host_gib": ("GiB", "Most resident memory of a rank since the run began."),
    "time/generate_s": ("s", "Episodes: engine, tools and agent."),
    "time/reward_s": ("s", "Reward functions."),
    "time/score_s": ("s", "Old and reference log-probs."),
    "time/credit_s": ("s", "Branch credit."),
    "time/train_s": ("s", "Forward and backward passes of an optimizer step."),
    "train_loss": ("-", "At the end of a run: mean of `loss`."),
    "train_runtime": ("s", "At the end of a run."),
    "train_samples_per_second": ("episodes/s", "At the end of a run."),
    "train_steps_per_second": ("steps/s", "At the end of a run."),
    "total_flos": ("FLOP", "transformers' own estimate, which knows no packed rows: 0."),
    "eval_loss": ("-", "The objective on held-out questions; its size says little."),
    "eval_runtime": ("s", "Of one evaluation."),
    "eval_samples_per_second": ("episodes/s", "Of one evaluation."),
    "eval_steps_per_second": ("batches/s", "Of one evaluation."),
}
# Columns of wandb histograms, one value an episode.
HISTOGRAMS = (
    "advantage", "mounts", "owned_tokens", "reward", "rewinds", "threads", "turn_tokens",
)  # fmt: skip

HEAD = """# Metrics

Written by `python -m octopus_trl.train.metrics`; edit `octopus_trl/train/metrics.py` instead.

What a run hands to the Trainer's logger, and so to every tracker that `report_to` names, each
`logging_steps`. An evaluation logs the same names with `eval_` in front; reward functions may add
their own through `log_metric`. Means over ranks weigh what they count (tokens, episodes, seconds).

| name | unit | meaning |
|---|---|---|
"""
TAIL = """
With `report_to: wandb` each generation adds the histograms {histograms} under `histogram/`, one
value an episode (`turn_tokens`: a turn); other trackers get none. transformers and TRL add names of
their own there: `train/global_step` and `profiling/Time taken: …`.
"""


def render() -> str:
    """Give the document as text."""
    rows = [
        f"| `{name}` | {unit} | {meaning.replace('|', chr(92) + '|')} |"
        for name, (unit, meaning) in METRICS.items()
    ]
    names = ", ".join(f"`{name}`" for name in HISTOGRAMS)
    return HEAD + "\n".join(rows) + "\n" + TAIL.format(histograms=names)


def is_known(name: str) -> bool:
    """Whether the table explains a logged name."""
    bare = name.removeprefix("eval_")
    if name in METRICS or bare in METRICS:
        return True
    parts = bare.split("/")
    return len(parts) == 3 and f"{parts[0]}/NAME/{parts[2]}" in METRICS


if __name__ == "__main__":
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"{DOCUMENT}\n")
