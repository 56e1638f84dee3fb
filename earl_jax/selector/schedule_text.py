# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A schedule in tables and words for people, and as plain values for programs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from earl_jax.selector.footprint import device_bytes
from earl_jax.selector.schedule import Choice, Prospect, Scene, Stop
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.plan_text import bytes_text, table_lines

# How far computed bytes are from XLA's at most, and how far that is known.
BYTES_ERROR = 0.10
# A program has been seen that needs 12 % more than was computed; what is this far from the budget
# is safe.
MARGIN = 0.15
_TRUST = (
    "computed bytes (~) are within 10 % of XLA's for 55 of 55 programs compiled for TPUs and H100s "
    "in bf16 with remat, 20 % otherwise (benchmarks/plan.md); ? marks what is nearer than 15 % to "
    "the budget; times are a roofline of data sheets, not measured"
)
_KINDS = {
    "train": ("weights", "optimizer", "gradients", "activations"),
    "rollout": ("weights", "cache", "activations", "trainer"),
}
# Of the meshes that fit beside the one that is chosen, so many are named.
_OTHERS = 4


def hardware_lines(scene: Scene, *, exact: bool) -> Iterator[str]:
    """What is planned for, by which rules, and how far the figures are to be trusted."""
    hardware, sizes = scene.hardware, scene.sizes
    numbers = device_bytes(sizes.frozen or sizes.trained, MeshShape())
    numbers //= (sizes.frozen or sizes.trained)[0].itemsize
    yield (
        f"{hardware.name}: {hardware.num_devices:,} devices on {hardware.num_hosts:,} hosts, "
        f"{bytes_text(scene.budget_bytes)} of each to be used ({bytes_text(hardware.memory_bytes)} "
        "of memory)"
    )
    yield f"model: {numbers / 1e9:,.3g} billion parameters, {sizes.vocab_size:,} entries"
    if exact:
        yield "exact: bytes of what is chosen are XLA's own; those marked ~ are computed, and times"
    yield f"quick: {_TRUST}" if not exact else f"  {_TRUST}"
    if scene.factors:
        named = ", ".join(f"{stage} x {factor:.3g}" for stage, factor in scene.factors.items())
        yield f"speeds are multiplied by measured over computed: {named}"


def hardware_values(scene: Scene, *, exact: bool) -> dict[str, Any]:
    """What `hardware_lines` says, for JSON."""
    return {
        "topology": scene.hardware.name,
        "devices": scene.hardware.num_devices,
        "hosts": scene.hardware.num_hosts,
        "budget_bytes_per_device": scene.budget_bytes,
        "mode": "exact" if exact else "quick",
        "calibration": dict(scene.factors),
        "expected_error": {"bytes": BYTES_ERROR, "words": _TRUST},
    }


def size_words(stop: Stop, enough: Iterable[tuple[str, int]]) -> str:
    """Which hardware would do for a room that fits no mesh."""
    words = ", ".join(f"{number} {chip}" for chip, number in enough)
    found = f"the smallest that would do: {words}" if words else "no number of known chips would do"
    return f"  room for {stop.places:,} tokens: {found} (quick mode, powers of two)"


def schedule_lines(
    scene: Scene, schedule: Sequence[Stop], contexts: Mapping[int, int]
) -> Iterator[str]:
    """Tables of both stages for each of `contexts` (tokens -> room), and where meshes change."""
    stops = {stop.places: stop for stop in schedule}
    work = scene.work
    yield ""
    yield (
        f"training: an update of {work.num_rows} rows in {work.micro_batches} micro-batches"
        f"{', remat' if work.remat else ''}; bytes per device"
    )
    yield from _table(scene, {c: stops[room].train for c, room in contexts.items()}, "train")
    yield ""
    yield (
        f"rollout: {work.num_slots} slots, every context at the end of its room; bytes per device"
    )
    yield from _table(scene, {c: stops[room].rollout for c, room in contexts.items()}, "rollout")
    yield ""
    yield "schedule:"
    yield from _changes(scene, schedule)


def _table(scene: Scene, choices: Mapping[int, Choice | None], stage: str) -> Iterator[str]:
    kinds = _KINDS[stage]
    speed = "s an update" if stage == "train" else "ms a token"
    header = ["context", "mesh", *kinds, "together", "of budget", speed, "tokens/s"]
    header += ["at once"] if stage == "rollout" else []
    rows, notes = [], []
    for context, choice in choices.items():
        if choice is None:
            notes.append(f"  {context:,}: training fits no mesh, so neither does the rollout")
            continue
        shown = choice.chosen or choice.least
        rows.append(_row(scene, context, shown))
        notes.append(f"  {context:,}: {_rung_words(scene, choice)}{_others(scene, choice)}")
    if rows:
        yield from table_lines(header, rows)
    yield from notes


def _moments_words(scene: Scene, prospect: Prospect) -> str:
    """Where the optimizer's moments are during a rollout, and what it takes or would free."""
    each = f"the optimizer's moments, {bytes_text(prospect.moments)} of each device"
    if prospect.offload:
        return f"{each}, wait in host memory ({_to_and_fro_s(scene, prospect):,.2f} s a step); "
    if scene.can_offload:
        return f"{each}, may stay, and could wait in host memory; "
    return ""


def _to_and_fro_s(scene: Scene, prospect: Prospect) -> float:
    """Seconds a step in which the moments go to the host's memory and come back."""
    return 2 * prospect.moments / scene.hardware.host_bytes_per_s


def _rung_words(scene: Scene, choice: Choice) -> str:
    """How an update goes about its batch, where that is not what the config says.

    Of a rollout, where the moments are.
    """
    prospect = choice.chosen or choice.least
    if prospect.stage == "rollout":
        return _moments_words(scene, prospect)
    way = _train_way(scene, prospect)
    return f"{way}; " if way else ""


def _row(scene: Scene, context: int, prospect: Prospect) -> list[str]:
    kinds, training = prospect.footprint.as_dict(), prospect.stage == "train"
    total = prospect.footprint.total
    cells = [f"{context:,}", str(prospect.mesh)]
    cells += [bytes_text(kinds.get(kind, 0)) for kind in _KINDS[prospect.stage]]
    cells += [
        bytes_text(total) + ("" if prospect.exact else " ~"),
        f"{total / scene.budget_bytes:.0%}{'' if _is_safe(scene, prospect) else ' ?'}",
        f"{prospect.seconds:,.2f}" if training else f"{1000 * prospect.seconds:,.2f}",
        f"{prospect.tokens_per_s:,.0f}",
    ]
    if training:
        return cells
    rows = scene.work.num_slots // prospect.mesh.data
    return [*cells, f"{prospect.rows_at_once} of {rows}"]


def _is_safe(scene: Scene, prospect: Prospect) -> bool:
    """Whether it fits even if it needs more than was computed, by as much as has been seen."""
    more = 1.0 if prospect.exact else 1.0 + MARGIN
    return prospect.footprint.total * more <= scene.budget_bytes


def _others(scene: Scene, choice: Choice) -> str:
    """What else fits, the fastest first, and how far what does not is from it."""
    if choice.chosen is None:
        return (
            f"no mesh fits; the least, {choice.least.mesh}, is "
            f"{bytes_text(choice.shortfall_bytes)} over the budget"
        )
    fits = [p for p in choice.prospects if p.footprint.total <= scene.budget_bytes]
    fits.sort(key=lambda p: -p.tokens_per_s)
    others = [p for p in fits if p.mesh != choice.chosen.mesh]
    named = ", ".join(
        f"{p.mesh} ({p.tokens_per_s / choice.chosen.tokens_per_s - 1:+.0%}, "
        f"{p.footprint.total / scene.budget_bytes:.0%} of budget)"
        for p in others[:_OTHERS]
    )
    more = f" and {len(others) - _OTHERS} more" if len(others) > _OTHERS else ""
    lost = [p for p in choice.prospects if p.footprint.total > scene.budget_bytes]
    words = f"also fit: {named}{more}" if others else "nothing else fits"
    if lost:
        near = min(lost, key=lambda p: p.footprint.total)
        over = bytes_text(near.footprint.total - scene.budget_bytes)
        words += f"; {len(lost)} do not, {near.mesh} by {over}"
    return words


def _changes(scene: Scene, schedule: Sequence[Stop]) -> Iterator[str]:
    """A line where it begins, where a stage changes its mesh, and where it ends."""
    before = None
    for stop in schedule:
        if not stop.fits:
            last = f"{before.places:,} tokens an episode" if before else "any of these contexts"
            yield f"  ends at {last}: room for {stop.places:,} fits no mesh of this hardware"
            return
        meshes = {"rollout": _mesh(stop.rollout), "train": _mesh(stop.train)}
        ways = _ways(scene, stop)
        if before is None:
            words = [f"{stage} {mesh}{_way(ways[stage])}" for stage, mesh in meshes.items()]
            yield f"  from the start: {', '.join(words)}"
        else:
            old = {"rollout": _mesh(before.rollout), "train": _mesh(before.train)}
            for stage, mesh in meshes.items():
                change = f"  beyond {before.places:,} tokens: {stage} {old[stage]}"
                if mesh != old[stage]:
                    yield f"{change} -> {mesh}{_way(ways[stage])}"
                elif ways[stage] != _ways(scene, before)[stage]:
                    yield f"{change}{_way(ways[stage] or 'as the config says')}"
        before = stop
    if before is not None:
        yield f"  and so to {before.places:,} tokens an episode"


def _ways(scene: Scene, stop: Stop) -> dict[str, str]:
    """On which rung each stage is, in words; "" where it is as the config says."""
    rollout = stop.rollout and stop.rollout.chosen
    return {
        "rollout": "the moments in host memory" if rollout and rollout.offload else "",
        "train": _train_way(scene, stop.train.chosen),
    }


def _train_way(scene: Scene, prospect: Prospect | None) -> str:
    rung = prospect.rung if prospect else None
    if rung is None or rung == (scene.work.micro_batches, scene.work.remat):
        return ""
    return f"in {rung.micro_batches} micro-batches{' with remat' if rung.remat else ''}"


def _way(words: str) -> str:
    return f" ({words})" if words else ""


def _mesh(choice: Choice | None) -> MeshShape | None:
    return choice.chosen.mesh if choice and choice.chosen else None


def schedule_values(
    scene: Scene, schedule: Sequence[Stop], contexts: Mapping[int, int]
) -> dict[str, Any]:
    """What `schedule_lines` says and all that it leaves out, for JSON."""
    stops = {stop.places: stop for stop in schedule}
    return {
        "contexts": [
            {"context": context, "places": room}
            | {
                stage: _choice_values(scene, choice)
                for stage, choice in (
                    ("train", stops[room].train),
                    ("rollout", stops[room].rollout),
                )
                if choice is not None
            }
            for context, room in contexts.items()
        ],
        "schedule": [
            {
                "places": stop.places,
                "fits": stop.fits,
                "switched": [
                    choice.chosen.stage
                    for choice in (stop.rollout, stop.train)
                    if choice and choice.chosen and choice.switched
                ],
            }
            | {
                f"{stage}_mesh": str(mesh)
                for stage, mesh in (("rollout", _mesh(stop.rollout)), ("train", _mesh(stop.train)))
                if mesh
            }
            for stop in schedule
        ],
    }


def _choice_values(scene: Scene, choice: Choice) -> dict[str, Any]:
    values: dict[str, Any] = {
        "meshes": [_prospect_values(scene, prospect) for prospect in choice.prospects]
    }
    if choice.chosen is None:
        return values | {"shortfall_bytes": choice.shortfall_bytes}
    return {"mesh": str(choice.chosen.mesh)} | values


def _prospect_values(scene: Scene, prospect: Prospect) -> dict[str, Any]:
    values: dict[str, Any] = {
        "mesh": str(prospect.mesh),
        "fits": prospect.footprint.total <= scene.budget_bytes,
        "safe": _is_safe(scene, prospect),
        "exact": prospect.exact,
        "bytes_per_device": prospect.footprint.total,
        "bytes": prospect.footprint.as_dict(),
        "tokens_per_s": prospect.tokens_per_s,
    }
    if prospect.rung:
        return values | {"update_s": prospect.seconds} | prospect.rung._asdict()
    values |= {"token_s": prospect.seconds, "rows_at_once": prospect.rows_at_once}
    values |= {"moments_bytes": prospect.moments, "moments_on_host": prospect.offload}
    return values | ({"moments_s": _to_and_fro_s(scene, prospect)} if prospect.offload else {})
