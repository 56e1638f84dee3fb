# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The price of a token where rollouts and training have devices of different kinds: a model.

    uv run python -m benchmarks.two_groups [--write]

Plans of the product (`placement/group_planner.py`), from data sheets. Nothing runs.
"""

from pathlib import Path

from benchmarks.pages import parser_of, show, table
from earl_jax.config.file import make_config
from earl_jax.placement.group_planner import plan_groups
from earl_jax.placement.problem import find_model, overrides_for_chips

PRESETS = ("qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b")
CONTEXTS = (8192, 16384, 32768)
HOSTS = 16
# Of a device-hour, relative to an H20's.
PRICES = {"h20": 1.0, "h800": 2.85}
LINK_GB = 10.0


def rows_of(preset: str) -> list[dict[str, object]]:
    """Returns a row for each context: the cheapest of one kind of device, and of two kinds."""
    given = [
        f"model.preset={preset}",
        "rollout.num_slots=1024",
        "rollout.episodes_per_step=1024",
    ]
    contexts = ",".join(map(str, CONTEXTS))
    config = make_config({}, [*overrides_for_chips(given, contexts), *given])
    model, vocab_size = find_model(config, None)

    def cheapest(player: str, link_gb: float | None) -> dict[int, dict]:
        values, _ = plan_groups(
            config,
            model,
            vocab_size,
            (f"{player}:{HOSTS}x8", f"h800:{HOSTS}x8"),
            CONTEXTS,
            link_gb=link_gb,
            prices=f"{PRICES[player]},{PRICES['h800']}",
        )
        return {step["context"]: step for step in values["cheapest"]}

    one, two = cheapest("h800", None), cheapest("h20", LINK_GB)
    return [
        {
            "model": preset,
            "tokens": f"{context:,}",
            "H800 + H800": "{} + {}".format(*one[context]["devices"]),
            "a step s": one[context]["step_s"],
            "a million": one[context]["price"],
            "H20 + H800": "{} + {}".format(*two[context]["devices"]),
            "a step s, two kinds": two[context]["step_s"],
            "link s": two[context]["link_s"],
            "each for itself s": two[context]["link_each_s"],
            "a million, two kinds": two[context]["price"],
            "tokens a price": one[context]["price"] / two[context]["price"],
        }
        for context in CONTEXTS
        if context in one and context in two
    ]


if __name__ == "__main__":
    flags = parser_of(__doc__).parse_args()
    found = table([row for preset in PRESETS for row in rows_of(preset)])
    show(found, Path(__file__).with_suffix(".md"), write=flags.write)
