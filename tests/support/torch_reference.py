# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Writes torch_reference.json beside it: what torch_losses.py computes, with its inputs.

    uv run --no-project --with torch --with numpy python tests/support/torch_reference.py

Made with torch 2.15.0 (CPU), 2026-11. An algorithm without a case here fails its test.
"""

import json
import random
from pathlib import Path

from torch_losses import (
    ADVANTAGES,
    OVER_TOKENS,
    PER_TOKEN,
    UNIT,
    are_equal,
    finish_advantages,
    is_in_reward,
    make_tokens,
    moving_averages,
    of_group,
    policy_loss,
    value_loss,
)

FILE = Path(__file__).with_suffix(".json")
# Log of policy / old, in UNITs: equal, in the middle, and on both sides of the bounds 0.8, 1.2,
# 1.28, 3 (dual clip) and 5 (CISPO).
GAPS = (0, 60, -60, 500, -500, -229, -228, 186, 187, 252, 253, 1124, 1125, 1648, 1649)
# Of the critic, also on both sides of the bound 0.2.
VALUE_CHANGES = (0, 100, -150, 204, 205, -900)
BOUNDS = (256, -256)
HUGE = (25 * 1024, -25 * 1024, 1000 * 1024, -1000 * 1024, 19 * 1024, -19 * 1024)


# Episodes. `turns` and `samples` have a number for each token: the policy's t-th turn, or 0 for the
# environment's, and the sample. The fields of PER_TOKEN have one for each token of the policy.


def make_episode(rng: random.Random, gaps, group, rewards, turns, **fields) -> dict:
    episode = {"group": group, "role": "x", "stop_reason": "done", "rewards": rewards}
    episode |= {"turns": turns, "samples": [1] * len(turns)} | fields
    # What each turn answers: one of two messages in turns.
    episode["states"] = [(len(rewards) + turn) % 2 for turn in range(len(rewards))]
    drawn = {name: [] for name in PER_TOKEN}
    for _ in filter(None, turns):
        behaviour = rng.randint(-4 * 1024, -64)
        drawn["behaviour"].append(behaviour)
        # Both differences are of GAPS: that to behaviour, and in turn that of the proximal policy.
        gap = rng.choice(gaps)
        drawn["logprobs"].append(behaviour + gap)
        drawn["proximal"].append(behaviour + gap - rng.choice(GAPS))
        drawn["reference"].append(behaviour + rng.choice([*gaps, 1000, -1000]))
        drawn["entropy"].append(rng.randint(0, 3000))
        drawn["old_values"].append(rng.randint(-1000, 1000))
        changes = BOUNDS if gaps is BOUNDS else VALUE_CHANGES
        drawn["values"].append(drawn["old_values"][-1] + rng.choice(changes))
    return episode | drawn


def make_batches() -> dict[str, list[dict]]:
    rng = random.Random(7)

    def episode(*facts, gaps=GAPS, **fields) -> dict:
        return make_episode(rng, gaps, *facts, **fields)

    mixed = [
        episode(0, [1.0], [0, 1, 1, 1]),
        episode(0, [0.25, -1.0], [0, 1, 1, 0, 2, 2, 2, 2], role="o"),
        # Forks: the second sample has the conversation again.
        episode(0, [0.0, 0.5, 1.0], [0, 1, 1, 0, 0, 2, 0, 3, 3], samples=[1] * 3 + [2] * 6),
        # Equal up to rounding, and large.
        episode(1, [100.1], [0, 0, 1, 1]),
        episode(1, [0.1, 100.0], [0, 1, 0, 2, 2], role="o"),
        episode(1, [100.1], [0, 1, 1, 1, 1, 1]),
        # Alone in its group: the environment failed the other.
        episode(2, [-0.75], [0, 1, 1]),
        episode(2, [], [0, 1, 1], stop_reason="environment_error"),
        # A reply of no token, and one of a turn that has none.
        episode(3, [0.5], [0, 0]),
        episode(3, [0.0, -0.5], [0, 1, 1, 1, 0, 2], role="o"),
        episode(3, [2.0], [0] + [1] * 7),
    ]
    return {
        "mixed": mixed,
        "equal": [episode(0, [100.1], [0, 1, 1]) for _ in range(7)],
        "alone": [episode(0, [3.0], [0, 1, 1])],
        "failed": [episode(0, [], [0, 1], stop_reason="environment_timeout") for _ in range(2)],
        "huge": [episode(i // 4, [float(i)], [0] + [1] * 5, gaps=HUGE) for i in range(8)],
        "at_clip": [episode(0, [float(i % 2)], [0, 1, 1], gaps=BOUNDS) for i in range(8)],
    }


# Cases.

DEFAULTS = {
    "reinforce": {"turn_discount": 0.7},
    "spiral": {
        "turn_discount": 1.0,
        "baseline": "ema",
        "baseline_decay": 0.95,
        "normalize_advantages": False,
    },
    "grpo": {"aggregation": "sequence"},
    "dr_grpo": {"normalize_advantages": False, "aggregation": "constant"},
    "gigpo": {"turn_discount": 0.95},
    "dapo": {"clip_high": 0.28},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence"},
    "reinforce_plus_plus": {"kl_estimator": "k1", "kl_in": "reward"},
    "reinforce_plus_plus_baseline": {"kl_estimator": "k2", "kl_in": "loss"},
    "ppo": {"kl_estimator": "k1", "kl_in": "reward"},
    "tba": {"kl_coefficient": 0.05, "aggregation": "sequence"},
    "distillation": {
        "kl_coefficient": 1.0,
        "kl_estimator": "k1",
        "kl_in": "reward",
        "kl_discount": 0.0,
    },
}
AVERAGES = {"x": 0.5, "o": -0.25}
KL = {"kl_coefficient": 0.1}
PLAIN = {"normalize_advantages": False}


def make_cases() -> list[dict]:
    """Returns algorithm, args (config.algorithm_args), batch, correction and cap of each case."""

    def case(algorithm: str, batch: str = "mixed", correction: str = "", **fields) -> dict:
        keys = ("is_first", "entropy_coefficient", "averages")
        rest = {key: fields.pop(key) for key in keys if key in fields}
        cap = 2.0 if correction else 0.0
        found = {"algorithm": algorithm, "batch": batch, "correction": correction, "cap": cap}
        return found | rest | {"args": fields}

    cases = [
        case(name, averages=AVERAGES) if name == "spiral" else case(name) for name in ADVANTAGES
    ]
    for batch in ("equal", "alone", "failed"):
        names = ("reinforce", "grpo", "gigpo", "gspo", "rloo", "reinforce_plus_plus", "ppo")
        cases += [case(name, batch) for name in names]
    cases += [case("tba", each) for each in ("equal", "alone", "failed", "huge")]
    cases.append(case("tba", kl_coefficient=2.0, entropy_coefficient=0.01))
    cases += [case("dapo", "equal"), case("grpo", "equal", deviation="sample")]
    for name in ("grpo", "cispo", "gspo"):
        cases.append(case(name, "huge"))
    cases += [
        case("grpo", "huge", dual_clip=3.0),
        case("grpo", "huge", kl_estimator="k2", **KL),
        case("grpo", "huge", kl_estimator="k3", **KL),
        *(case("grpo", "huge", each) for each in ("truncated", "truncated_sequence", "masked")),
        # clip_high and clip_low are e^0.25 and e^-0.25: ratios are at the bounds.
        case("rloo", "at_clip", clip_high=0.2840254166877414, clip_low=0.22119921692859512),
        case("ppo", "at_clip", value_clip=0.25),
        # Advantages.
        case("reinforce", baseline="group", normalize_advantages=False),
        case("reinforce", baseline="none", turn_discount=0.5),
        case("reinforce", baseline="ema", averages=AVERAGES, baseline_decay=0.9),
        case("spiral", averages={"o": 0.125}),
        case("grpo", deviation="sample"),
        case("grpo", **PLAIN),
        case("gigpo", deviation="sample", turn_weight=0.5, turn_discount=0.5),
        case("dapo", overlong_tokens=7, overlong_buffer=4, deviation="sample"),
        case("ppo", gamma=0.9, gae_lambda=0.8, value_clip=0.0, **PLAIN),
        case("ppo", gae_level="turn", gamma=0.9, gae_lambda=0.8),
        case("ppo", gae_level="turn", **KL, **PLAIN),
        case("ppo", kl_estimator="k3", **KL),
        case("ppo", kl_estimator="k2", kl_in="loss", **KL),
        case("reinforce_plus_plus", **KL),
        case("reinforce_plus_plus_baseline", **KL),
        # Losses.
        case("grpo", clip_high=0.28, dual_clip=3.0),
        case("dr_grpo", aggregation_tokens=16),
        case("rloo", aggregation="sequence", entropy_coefficient=0.01),
        case("gspo", clip_low=0.2, clip_high=0.2),
        case("gspo", clip_low=0.3, clip_high=0.3, dual_clip=1.5, aggregation="token"),
        case("cispo", clip_low=0.2, clip_high=0.28, aggregation="constant", aggregation_tokens=8),
        *(case("grpo", kl_estimator=each, **KL) for each in ("k2", "k3")),
        *(case("dr_grpo", kl_estimator=each, kl_in="reward", **KL) for each in ("k1", "k2", "k3")),
        case("rloo", kl_estimator="k1", kl_in="reward", **KL),
        # Who sampled, who trains.
        *(case("grpo", correction=each) for each in ("truncated", "truncated_sequence", "masked")),
        case("grpo", correction="truncated", is_first=True),
        case("cispo", correction="truncated"),
        case("gspo", correction="truncated_sequence", clip_low=0.2, clip_high=0.2),
        case("reinforce_plus_plus", correction="truncated", **KL),
        case("ppo", correction="masked", kl_estimator="k1", **KL),
        case("dr_grpo", correction="truncated", kl_estimator="k3", kl_in="loss", **KL),
        # A teacher.
        case("distillation", "huge"),
        case("distillation", kl_discount=0.5, correction="truncated", aggregation="sequence"),
        case("distillation", kl_discount=1.0, kl_coefficient=0.3, entropy_coefficient=0.01),
        *(case("distillation", kl_in="loss", kl_estimator=each) for each in ("k2", "k3")),
    ]
    return cases


def counts(algorithm: str, episodes: list[dict], episode: dict) -> bool:
    """False for a failure; DAPO, 2503.14476, eq. 11: not all outcomes of the group are equal."""
    if episode["stop_reason"] != "done":
        return False
    group = of_group([e for e in episodes if e["stop_reason"] == "done"], episode, {})
    return algorithm != "dapo" or not are_equal(group)


def solve(case: dict, episodes: list[dict], nudge: float = 0.0) -> dict:
    """Returns what is expected; `nudge` is added to the log-probs and the critic's values."""
    algorithm = case["algorithm"]
    args = DEFAULTS.get(algorithm, {}) | case["args"] | {"averages": case.get("averages", {})}
    flags = [counts(algorithm, episodes, episode) for episode in episodes]
    own = [episode for episode, flag in zip(episodes, flags, strict=True) if flag]
    expected = {"counts": [int(flag) for flag in flags]}
    if not own:
        return expected | {"advantages": [], "loss": 0.0, "gradient": []}
    tokens = make_tokens(own, ADVANTAGES[algorithm](own, args))
    if args.get("baseline") == "ema":
        expected["averages"] = moving_averages(own, args)
    for token in tokens:
        token["logprobs"] = (token["logprobs"] + nudge).requires_grad_()
        token["values"] = (token["values"] + nudge).requires_grad_()
        if case.get("is_first"):
            token["proximal"] = token["logprobs"].detach()
        token["old"] = token["proximal"] if case["cap"] else token["behaviour"]
    finish_advantages(algorithm, tokens, args)
    loss = policy_loss(case, tokens, args)
    loss.backward()
    if algorithm in (*OVER_TOKENS, "distillation") or not is_in_reward(args):
        # A penalty beside other advantages is part of the loss.
        expected["advantages"] = [float(token["advantage"]) for token in tokens]
    expected |= {
        "loss": float(loss.detach()),
        "gradient": [float(t["logprobs"].grad) for t in tokens],
    }
    return expected | (value_loss(tokens, args) if algorithm == "ppo" else {})


def rounded(value):
    """Eight digits: more than fp32 has."""
    if isinstance(value, float):
        return float(f"{value:.8g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def numbers() -> dict:
    """Returns what the file has: inputs, cases and what is expected of each."""
    batches, cases = make_batches(), make_cases()
    for case in cases:
        episodes = batches[case["batch"]]
        case["expected"] = solve(case, episodes)
        if case["batch"] == "at_clip":
            # The loss has a slope on each side of a bound, between which any is right.
            sides = [solve(case, episodes, nudge) for nudge in (-1e-6, 1e-6)]
            for name in {"gradient", "value_gradient"} & case["expected"].keys():
                case["expected"][name] = [side[name] for side in sides]
    return {"unit": UNIT, "batches": batches, "cases": [rounded(case) for case in cases]}


if __name__ == "__main__":
    FILE.write_text(json.dumps(numbers(), separators=(",", ":")) + "\n")
