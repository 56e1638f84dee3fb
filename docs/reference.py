# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of docs/reference/ from the code.

    uv run python docs/reference.py            # writes them
    uv run python docs/reference.py --check    # exit status 1 where one differs

config.md comes from the dataclasses and their docstrings, commands.md from --help, metrics.md from
METRICS below, whose names a test holds against a run.
"""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from earl_jax.config.keys import Section

FOLDER = Path(__file__).parent / "reference"
COMMANDS = ("main", "evaluate", "serve", "plan", "bench", "view")
NOTE = "<!-- Written by docs/reference.py; edit the code and run it again. -->\n"

# metrics.jsonl, by topic: each name with its meaning. A key without a value in a run is left out.
METRICS: dict[str, dict[str, str]] = {
    "Step": {
        "step": "The RL step, from 1; in an evaluation the steps trained so far.",
        "time_s": "Seconds that the run has taken so far, those before it was resumed too.",
        "stage_s": "Seconds of each stage: select, publish, rollout, dispatch, train, ...",
        "expected_step_s": "Seconds that the selector expected the step to take.",
        "compile_s": "Seconds that the run waited for programs to be compiled or loaded.",
        "compiles": "Number of programs that the run compiled or loaded, but for those that it "
        "compiled ahead.",
        "checkpoint_s": "Seconds that saving the checkpoint after the step before stalled the "
        "run; files are written beside the next steps.",
    },
    "Episodes": {
        "reward_mean": "Mean reward of the step's episodes, without those that failed.",
        "reward_std": "Standard deviation of these rewards.",
        "episodes": "Number of episodes.",
        "failed_share": "Share of the episodes that failed: the environment raised, hung, or wrote "
        "what cannot be encoded, or what leaves no token for a reply.",
        "failure": "The most frequent reason of these.",
        "equal_groups": "Share of the groups whose rewards are all equal; nothing is learnt from "
        "these relative to their group.",
        "dropped_groups": "Share of the groups that the algorithm did not train on (DAPO).",
        "env": "What the environment reports of an episode, each number: its mean over the "
        "episodes that did not fail.",
        "turns_mean": "Mean number of the policy's turns.",
        "context_tokens_mean": "Mean number of tokens of an episode, whoever wrote them.",
        "context_tokens_max": "Tokens of the longest episode.",
        "version_lag_max": "Most policy versions between sampling a token and training on it.",
        "version_lag_mean": "The mean over these tokens.",
        "staleness_tokens": (
            "Tokens that were trained on, by the policy versions since they were sampled: 0, 1, ..."
        ),
        "overdue_tokens": "Tokens of trained episodes that are beyond the bound: trained on "
        "(config.asynchrony.rule 'admission'), or their loss left out ('mask').",
        "stale_episodes": "Episodes that were given up because they were too old, or none.",
        "refilled_groups": "Groups that the algorithm does not keep, in whose place others were "
        "played (config.asynchrony.refill), or none.",
        "reused_groups": "Groups that earlier steps had trained on too (config.asynchrony.reuse), "
        "or none.",
        "stale_tokens": "Tokens of the policy in these.",
        "stale_tokens_mean": "Their mean; far from that of the trained ones, it is a bias.",
    },
    "Rollout": {
        "rollout_tokens": "Tokens that the policy sampled.",
        "rollout_tokens_per_s": "`rollout_tokens` over the seconds of the rollout.",
        "prefill_tokens": "Tokens of prompts and answers that were computed.",
        "shared_tokens": "Tokens whose KV cache was taken from another episode's prefix.",
        "copied_tokens": "The part of `shared_tokens` that was copied from other devices.",
        "tokens_in_flight_max": "Most tokens in the KV cache at one time.",
        "rollout_max_tokens": "Context bucket of the rollout's programs, in tokens.",
        "decode_rows": "Rows that decode steps computed.",
        "idle_rows": "Of these, rows of slots that sampled nothing.",
        "env_wait_s": "Seconds in which no slot had work, because environments were busy.",
        "hung_calls": "Calls of environments that were given up and still hang, each in a thread.",
        "other_shard_episodes": "Episodes that played in a slot of another data shard.",
        "preempted_episodes": "Preemptions of episodes for lack of pages.",
        "recomputed_tokens": "Tokens read again, after a preemption or by new weights.",
        "preempted_host_bytes": "Bytes of preempted pages to host memory and back.",
        "preemption": "What preempted episodes do, in words: recompute or host.",
        "discarded_tokens": "Tokens sampled behind a stop in the same burst, and discarded.",
        "drafted_tokens": "Tokens that speculation drafted.",
        "draft_acceptance": "Fraction of drafted tokens that were accepted.",
        "tokens_per_pass": "Tokens a slot generated a forward pass, with speculation.",
    },
    "Selector": {
        "rollout_mesh": "Mesh of the rollout, as `data=4,tensor=2`.",
        "train_mesh": "Mesh of the trainer.",
        "plan": "What the plans do otherwise than the config says (micro-batches, remat, ...).",
        "decision": "The reason for the choice, in words.",
        "switched": "Stages that changed their plan in this step.",
        "switch_s": "Seconds of these changes.",
        "out_of_memory": "Plans that ran out of memory in this step.",
        "peak_bytes_per_device": (
            "Bytes of a device that the fullest plan of the step takes: XLA's if its program was "
            "compiled before it was chosen, else computed from shapes."
        ),
        "budget_bytes_per_device": "The budget; left out where there is none.",
    },
    "Dispatch": {
        "dispatch_bytes": "Bytes of experience that devices lacked, before rows are packed.",
        "dispatch_host_bytes": "Bytes of experience that passed through the host.",
        "publish_bytes": "Bytes of weights that devices lacked.",
        "publish_host_bytes": "Bytes of weights that passed through the host.",
    },
    "Training": {
        "train_tokens": "Tokens of the episodes trained on, whoever wrote them, over all "
        "updates of the step.",
        "train_tokens_per_s": "`train_tokens` over the seconds of training; null for parts.",
        "packing_fill": "Fraction of the positions of the step's training rows that hold a token.",
        "loss": "Loss of the step's last epoch: the mean of its updates, weighted by their "
        "`policy_tokens`.",
        "kl": "KL to the policy that sampled (k3 estimate): its mean over the tokens of the step's "
        "last epoch.",
        "entropy": "Mean entropy of the policy over the tokens of the step's first epoch.",
        "learning_rate": "Learning rate of the step, before `config.train.ess_scaling`.",
        "entropy_coefficient": "Coefficient of the entropy bonus.",
        "skipped_updates": "Updates that were skipped: loss, gradient or step was not finite.",
        "sft_loss": "Loss of the last supervised update, where there are some.",
        "supervised_loss": "Mean cross-entropy of the supervised stream (config.train.sft_weight), "
        "averaged like `loss`.",
        "policy_tokens": "Tokens that the policy sampled in episodes that count.",
        "clip_fraction": "Fraction of the tokens of the step's last epoch that the clip cut off.",
        "dual_clip_fraction": "Fraction of tokens that the dual clip cut off.",
        "balance_error": "Mean absolute value of what `tba` squares.",
        "reference_kl": "Estimate of the KL to the reference policy, where there is a penalty, "
        "or to a teacher.",
        "value_loss": "Loss of the critic: its mean over the tokens of the step's last epoch.",
        "value_clip_fraction": "Fraction of values whose clip was the larger error.",
        "explained_variance": "1 - Var[return - value] / Var[return] of the critic's values before "
        "the step's first update; 0 where all returns are equal.",
        "critic_grad_norm": "Norm of the critic's gradient before clipping, averaged like `loss`.",
        "effective_sample_size": "(sum w)^2 / sum w^2 over the tokens, with w the policy's "
        "probability over that of who sampled, as a fraction of an update's tokens; averaged like "
        "`loss`.",
        "grad_norm": "Norm of the gradient before clipping, averaged like `loss`.",
        "logprob_mismatch_max": "Largest difference of a log-prob of the trainer and the engine, "
        "in the step's first epoch.",
        "logprob_mismatch_mean": "Mean of these differences over the same tokens.",
        "kept_kv_gap_max": "Largest of these differences over tokens that the newest weights "
        "sampled: rounding, and KV that older weights wrote. In the first update of a step of "
        "asynchronous runs.",
        "kept_kv_gap_mean": "Mean of these differences over the same tokens; 0 without any.",
        "sampling_kl": "KL of the sampling distribution to the model (top-k, temperature, ...).",
        "importance_mean": "Mean importance weight of the correction, truncated at its cap.",
        "truncated_fraction": "Fraction of tokens whose importance weight was truncated.",
        "balance_loss": "Load-balancing loss of a mixture of experts.",
        "expert_load_max": "Load of the busiest expert, 1 where all are equal.",
        "expert_load_entropy": "Entropy of the experts' loads.",
    },
    "Evaluation": {
        "eval": "An evaluation: its name, episodes, mean reward, and what the environment reports, "
        "over the episodes that did not fail; `failed_share`, the share of those that failed, and "
        "`failure`, their most frequent reason, where any did (where all did, there are no means); "
        "with several samples of each task (config.eval.samples) `reward_best_of_N`, the "
        "expected best reward of N samples of a task, over the tasks with N that did not fail; "
        "with config.eval.sft_path `sft_loss`, the mean cross-entropy of the tokens to learn of "
        "these conversations, and `sft_tokens`, their number.",
    },
}


def config_page() -> str:
    """Returns the page of all config keys."""
    from earl_jax.config.combinations import OF_LEARNING, OF_MODEL, OF_SETTINGS
    from earl_jax.config.config import Config
    from earl_jax.config.keys import algorithm_sections, sections_of
    from earl_jax.config.resume import MAY_CHANGE

    lines = [f"# Configuration\n\n{NOTE}"]
    lines += [
        "A config file returns an `ml_collections.ConfigDict` with what differs from these "
        "defaults; `--config.section.key=value` on the command line changes one value. An unknown "
        "key, a value of another type, and a key without effect in the run are errors. The "
        "complete configuration of a run is in its `config.json`.\n"
    ]
    for section in sections_of(Config, "config"):
        lines += _section(section)
    for name, section in algorithm_sections():
        lines.append(f'# With config.algorithm="{name}"\n')
        lines += _section(section)
    lines.append("# Settings that may change when a run is resumed\n\n| key | effect |\n|---|---|")
    for name, effect in MAY_CHANGE.items():
        is_section = dataclasses.is_dataclass(getattr(Config, name, None))
        lines.append(f"| `config.{name}{'.*' if is_section else ''}` | {effect} |")
    lines.append("| `config.distributed.*` | It is not in config.json. |\n")
    lines.append("# Combinations that are refused, and why\n")
    lines.append(
        "They are refused before anything is built, by a run, `--check` and the planner.\n"
    )
    lines.append("| refused | why, and what to change |\n|---|---|")
    for rule in (*OF_SETTINGS, *OF_MODEL, *OF_LEARNING):
        # Values of the config are in braces.
        words = re.sub(r"{[^}]*}", "…", f"{rule.given} | {rule.reason}")
        lines.append(f"| {words} |")
    return "\n".join(lines)


def _section(section: "Section") -> Iterator[str]:
    is_whole = section.path == "config"
    yield f"{section.about}\n" if is_whole else f"## {section.path}\n\n{section.about}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for key in section.keys:
        kind = ", ".join(f"`{choice!r}`" for choice in key.choices) or key.type
        cells = (f"`{key.path}`", kind, f"`{key.default!r}`", key.meaning)
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
    yield ""


def metrics_page() -> str:
    """Returns the page of the keys of metrics.jsonl."""
    lines = [
        f"# Metrics\n\n{NOTE}",
        "`WORKDIR/metrics.jsonl` has a JSON object a line: one for each training step, and one for "
        "each evaluation. A key that has no value in a run is left out. NaN and infinity are the "
        'strings "nan", "inf" and "-inf"; `earl_jax.telemetry.metrics.read_metrics` reads them as '
        "numbers.\n",
    ]
    for topic, metrics in METRICS.items():
        lines.append(f"## {topic}\n\n| key | meaning |\n|---|---|")
        lines += [f"| `{name}` | {meaning} |" for name, meaning in metrics.items()]
        lines.append("")
    return "\n".join(lines)


def commands_page() -> str:
    """Returns the page of all commands, by their --help without the settings."""
    from earl_jax.config.keys import SETTINGS

    lines = [f"# Commands\n\n{NOTE}"]
    for name in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", f"earl_jax.{name}", "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "100"},
        )
        text, settings, _ = done.stdout.partition(SETTINGS)
        shown = text + f"{settings} see Configuration" * bool(settings)
        lines.append(f"## python -m earl_jax.{name}\n\n```text\n{shown.rstrip()}\n```\n")
    return "\n".join(lines)


PAGES = {"config.md": config_page, "metrics.md": metrics_page, "commands.md": commands_page}


def main() -> None:
    """Writes or checks the pages."""
    stale = []
    for name, make in PAGES.items():
        path, text = FOLDER / name, make().rstrip() + "\n"
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(name)
    if stale:
        sys.exit(f"docs/reference/{stale[0]} is not what the code says: run docs/reference.py")


if __name__ == "__main__":
    main()
