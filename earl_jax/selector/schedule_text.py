# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A schedule in tables and words for people, and as plain values for programs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from earl_jax.selector.footprint import device_bytes
from earl_jax.selector.ladder import RolloutRung
from earl_jax.selector.prospects import Prospect, Scene, slots_words, to_and_fro_s, way_of
from earl_jax.selector.schedule import Choice, Stop
from earl_jax.sharding.layout import MeshShape
from earl_jax.sharding.plan_text import bytes_text, table_lines

# Of programs in bf16 that were compiled for TPUs and H100s, so many of so many take within a tenth
# of what was computed (benchmarks/plan.md), and none more than that. Two in fp32 took 12 % more.
WITHIN, PROGRAMS = 121, 121
BYTES_ERROR, BYTES_ERROR_FP32 = 0.10, 0.15
# What is so far from the budget is safe.
MARGIN = 0.15
_TRUST = (
    f"computed bytes (~) are within 10 % of XLA's for {WITHIN} of {PROGRAMS} programs compiled for "
    "TPUs and H100s in bf16, and too few by no more for any; in fp32 by up to 12 % "
    "(benchmarks/plan.md); ? marks what is nearer than 15 % to the budget; times are a roofline of "
    "data sheets: which of two is faster it tells better than by how much (gains of 3 to 6 % have "
    "been computed as 25 to 51 %), and updates on meshes over context up to 2.5 times too fast"
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
        "expected_error": {
            "bytes": BYTES_ERROR if scene.sizes.compute_bytes < 4 else BYTES_ERROR_FP32,
            "words": _TRUST,
        },
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
    if lines := [*_steps({c: stops[room] for c, room in contexts.items()})]:
        yield ""
        yield "steps, of episodes that fill their room:"
        yield from lines
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
        notes.append(f"  {context:,}: {_chosen_words(scene, choice)}{_others(scene, choice)}")
    if rows:
        yield from table_lines(header, rows)
    yield from notes


def _steps(stops: Mapping[int, Stop]) -> Iterator[str]:
    """What both stages take together, and the next best pair, where speeds are compared."""
    for context, stop in stops.items():
        if stop.step_s is not None:
            yield f"  {context:,}: {stop.step_s:,.2f} s; {stop.second}"


def way_words(scene: Scene, prospect: Prospect) -> str:
    """In which way a mesh is used, in brackets; "" where it is as the config says."""
    words = way_of(scene.work, prospect.rung)
    return f" ({words})" if words else ""


def _chosen_words(scene: Scene, choice: Choice) -> str:
    """How the stage goes about its work; of a rollout too what the moments take or would free."""
    prospect = choice.chosen or choice.least
    if isinstance(prospect.rung, RolloutRung):
        words = (slots_words(scene.work, prospect.rung), _moments_words(scene, prospect))
    else:
        words = (way_of(scene.work, prospect.rung),)
    return "".join(f"{part}; " for part in words if part)


def _moments_words(scene: Scene, prospect: Prospect) -> str:
    """Where the optimizer's moments are during a rollout, and what it takes or would free."""
    each = f"the optimizer's moments, {bytes_text(prospect.moments)} of each device"
    if prospect.offload:
        away_s = to_and_fro_s(scene.hardware, prospect.moments)
        return f"{each}, wait in host memory ({away_s:,.2f} s a step)"
    if not scene.can_offload:
        return ""
    if problem := scene.host_obstacle(prospect.moments):
        return f"{each}, must stay: that they wait in host memory {problem}"
    return f"{each}, may stay, and could wait in host memory"


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
    assert isinstance(prospect.rung, RolloutRung)
    rows = prospect.rung.num_slots // prospect.mesh.data
    return [*cells, f"{prospect.rows_at_once} of {rows}"]


def _is_safe(scene: Scene, prospect: Prospect) -> bool:
    """Whether it fits even if it needs more than was computed, by as much as has been seen."""
    more = 1.0 if prospect.exact else 1.0 + MARGIN
    return prospect.footprint.total * more <= scene.budget_bytes


def _others(scene: Scene, choice: Choice) -> str:
    """What else fits, the fastest first, and how far what does not is from it."""
    chosen = choice.chosen
    if chosen is None:
        return (
            f"no mesh fits; the least, {choice.least.mesh}, is "
            f"{bytes_text(choice.shortfall_bytes)} over the budget"
        )

    def compared(prospect: Prospect) -> str:
        return (
            f"({prospect.tokens_per_s / chosen.tokens_per_s - 1:+.0%}, "
            f"{prospect.footprint.total / scene.budget_bytes:.0%} of budget)"
        )

    fits = [p for p in choice.prospects if p.fits(scene.budget_bytes)]
    fits.sort(key=lambda p: -p.tokens_per_s)
    others = [p for p in fits if p.mesh != chosen.mesh and p.leaves_room]
    ways = {p.mesh: way_of(scene.work, p.rung) for p in others}
    named = [" ".join(filter(None, (str(p.mesh), ways[p.mesh], compared(p)))) for p in others]
    hidden = len(others) - _OTHERS
    more = f" and {hidden} more (--json has all)" if hidden > 0 else ""
    words = f"also fit: {', '.join(named[:_OTHERS])}{more}" if others else "no other mesh fits"
    if second := choice.second:
        way = way_of(scene.work, second.rung) or "as the config says"
        words += f"; here {way} too {compared(second)}"
    if full := sum(not p.leaves_room for p in fits):
        words += f"; beside {full} no rollout fits"
    lost = [p for p in choice.prospects if not p.fits(scene.budget_bytes)]
    if lost:
        near = min(lost, key=lambda p: p.footprint.total)
        over = bytes_text(max(0, near.footprint.total - scene.budget_bytes))
        words += f"; {len(lost)} do not, {near.mesh} {near.impossible or f'by {over}'}"
    return words


def _changes(scene: Scene, schedule: Sequence[Stop]) -> Iterator[str]:
    """A line where it begins, where a stage changes its mesh or its way, and where it ends."""
    before = None
    for stop in schedule:
        if not stop.fits:
            last = f"{before.places:,} tokens an episode" if before else "any of these contexts"
            yield f"  ends at {last}: room for {stop.places:,} fits no mesh of this hardware"
            return
        now = {p.stage: (p.mesh, way_words(scene, p)) for p in _chosen(stop)}
        if before is None:
            words = [f"{stage} {mesh}{way}" for stage, (mesh, way) in now.items()]
            yield f"  from the start: {', '.join(words)}"
        else:
            for old in _chosen(before):
                mesh, way = now[old.stage]
                change = f"  beyond {before.places:,} tokens: {old.stage} {old.mesh}"
                if mesh != old.mesh:
                    yield f"{change} -> {mesh}{way}"
                elif way != way_words(scene, old):
                    yield f"{change}{way or ' (as the config says)'}"
        before = stop
    if before is not None:
        yield f"  and so to {before.places:,} tokens an episode"


def _chosen(stop: Stop) -> list[Prospect]:
    """What is chosen of both stages, the rollout's first."""
    choices = (stop.rollout, stop.train)
    return [choice.chosen for choice in choices if choice and choice.chosen]


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
            | {f"{prospect.stage}_mesh": str(prospect.mesh) for prospect in _chosen(stop)}
            | ({"step_s": stop.step_s} if stop.step_s is not None else {})
            | ({"second": stop.second} if stop.second else {})
            for stop in schedule
        ],
    }


def _choice_values(scene: Scene, choice: Choice) -> dict[str, Any]:
    values: dict[str, Any] = {
        "candidates": choice.candidates,
        "meshes": [_prospect_values(scene, prospect) for prospect in choice.prospects],
    }
    if choice.chosen is None:
        return values | {"shortfall_bytes": choice.shortfall_bytes}
    return {"mesh": str(choice.chosen.mesh)} | values


def _prospect_values(scene: Scene, prospect: Prospect) -> dict[str, Any]:
    values: dict[str, Any] = {
        "mesh": str(prospect.mesh),
        "fits": prospect.fits(scene.budget_bytes),
        "safe": _is_safe(scene, prospect),
        "exact": prospect.exact,
        "bytes_per_device": prospect.footprint.total,
        "bytes": prospect.footprint.as_dict(),
        "tokens_per_s": prospect.tokens_per_s,
    }
    rung = prospect.rung
    if not isinstance(rung, RolloutRung):
        values |= {"update_s": prospect.seconds, "leaves_room": prospect.leaves_room}
        return values | rung._asdict()
    values |= {"token_s": prospect.seconds, "rows_at_once": prospect.rows_at_once}
    values |= {"num_slots": rung.num_slots, "page_size": rung.page_size}
    values |= {"moments_bytes": prospect.moments, "moments_on_host": rung.offload}
    away_s = to_and_fro_s(scene.hardware, prospect.moments)
    return values | ({"moments_s": away_s} if rung.offload else {})
