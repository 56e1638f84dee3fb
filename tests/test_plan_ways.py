# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The planner's choice among ways to use a mesh: micro-batches, remat, slots, pages, moments."""

import dataclasses
import random

import pytest
from test_plan import scene_of

from earl_jax.compiled import compiler_for
from earl_jax.config_file import make_config
from earl_jax.selector.choose import NOISE
from earl_jax.selector.contenders import calibrated, train_contenders
from earl_jax.selector.footprint import row_bytes, trainer_bytes
from earl_jax.selector.guesses import busy_slots
from earl_jax.selector.ladder import RolloutRung, TrainRung
from earl_jax.selector.prospects import (
    on_rollout_rung,
    on_train_rung,
    rollout_prospect,
    train_prospect,
)
from earl_jax.selector.schedule import make_schedule
from earl_jax.selector.schedule_text import schedule_lines, schedule_values
from earl_jax.selector.throughput import Measurement
from earl_jax.sharding.layout import MeshShape

D8, T8, D4T2 = MeshShape(data=8), MeshShape(tensor=8), MeshShape(data=4, tensor=2)
GIB = 2**30
# A model of 1.2 billion parameters, and an update of 16 rows on one of two meshes.
SMALL = ("model.preset=llama3.2-1b", "model.compute_dtype=bfloat16", "selector.offload=off")
TWO_MESHES = (
    *SMALL,
    "rollout.num_slots=16",
    "rollout.episodes_per_step=16",
    "selector.train_meshes=('data=8','data=1,tensor=8')",
    # Of a step the update is a part: less of it than noise would not count.
    "selector.hysteresis=0",
)


def small_scene(*overrides, budget=10**12):
    return scene_of("h100:1x8", *overrides, budget=budget, vocab_size=128_256)


def with_budget(scene, budget):
    settings = dataclasses.replace(scene.settings, budget_bytes=budget)
    return dataclasses.replace(scene, settings=settings)


def trained(scene, places=4096):
    return make_schedule(scene, [places])[0].train.chosen


def update_on(scene, mesh, micro_batches, remat, places=4096):
    return train_prospect(on_train_rung(scene, TrainRung(micro_batches, remat)), mesh, places)


# Updates.


def test_remat_on_whole_layers_beats_none_on_layers_that_are_cut():
    """A fourth pass costs a third more, the all-reduces of eight parts of a layer more than that.

    The ladder tries all meshes without remat first.
    """
    scene = small_scene(*TWO_MESHES, "train.micro_batches=2", budget=32 * GIB)
    plain, cut = update_on(scene, D8, 2, False), update_on(scene, T8, 2, False)
    again = update_on(scene, D8, 2, True)
    assert plain.footprint.total > scene.budget_bytes
    assert max(cut.footprint.total, again.footprint.total) <= scene.budget_bytes
    # Five passes of logits' matrices beside four of the layers', which are less of the work.
    assert plain.tokens_per_s / again.tokens_per_s == pytest.approx(4 / 3, rel=0.08)
    assert again.tokens_per_s > 1.3 * cut.tokens_per_s
    assert trained(scene) == again
    listed = dataclasses.replace(scene, by_speed=False)
    assert trained(listed) == cut


def test_two_micro_batches_without_remat_beat_one_with():
    """Which the ladder comes to first."""
    scene = small_scene(*TWO_MESHES, budget=36 * GIB)
    whole, again = update_on(scene, D8, 1, False), update_on(scene, D8, 1, True)
    halves = update_on(scene, D8, 2, False)
    assert whole.footprint.total > scene.budget_bytes >= halves.footprint.total
    assert again.footprint.total < halves.footprint.total
    # A sum over the devices for each micro-batch, behind the layers' work.
    assert halves.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.01)
    choice = make_schedule(scene, [4096])[0].train
    assert choice.chosen == halves
    assert choice.second.rung == TrainRung(1, True)
    # Five numbers of micro-batches on a tensor axis over all, two over eight rows at a time.
    assert choice.candidates == 2 * 5 + 2 * 2
    assert [p.mesh for p in choice.prospects] == [D8, T8]
    listed = dataclasses.replace(scene, by_speed=False)
    assert trained(listed) == again
    # With room for it the update stays as the config says.
    assert trained(with_budget(scene, 60 * GIB)) == whole


def test_a_change_of_way_is_no_change_of_mesh():
    scene = small_scene(*TWO_MESHES, "selector.train_meshes=('data=8',)", budget=36 * GIB)
    stops = make_schedule(scene, [1024, 4096])
    assert [stop.train.chosen.rung for stop in stops] == [TrainRung(1, False), TrainRung(2, False)]
    assert not stops[1].train.switched
    contexts = {stop.places: stop.places for stop in stops}
    text = "\n".join(schedule_lines(scene, stops, contexts))
    assert "  4,096: in 2 micro-batches; no other mesh fits; here in 1 micro-batch with re" in text
    assert "beyond 1,024 tokens: train data=8 (in 2 micro-batches)" in text
    first, then = schedule_values(scene, stops, contexts)["contexts"]
    (now,) = then["train"]["meshes"]
    assert (now["micro_batches"], now["remat"], then["train"]["candidates"]) == (2, False, 4)
    assert first["train"]["meshes"][0]["micro_batches"] == 1


# Rollouts.


def slots_scene(meshes, budget, *overrides):
    slots = ("rollout.num_slots=512", "rollout.episodes_per_step=512")
    trainer = "selector.train_meshes=('data=1,fsdp=4,tensor=2',)"
    held = (trainer, f"selector.rollout_meshes={meshes}")
    return small_scene(*SMALL, *slots, *held, *overrides, budget=budget)


def rollout_on(scene, mesh, num_slots, places=64, pages=None, page_size=0):
    """By itself; pages for all slots unless they are said."""
    on_rung = on_rollout_rung(scene, RolloutRung(num_slots, 0, False, page_size))
    a_row = -(-places // on_rung.work.page_size)
    dense = num_slots // scene.hardware.num_devices * a_row
    rung = RolloutRung(num_slots, pages or dense, False, page_size)
    return rollout_prospect(on_rung, mesh, places, rung)


def beside_trainer(scene, num_bytes):
    """The scene with so many bytes for a rollout beside its only trainer."""
    (trainer,) = scene.train_meshes
    return with_budget(scene, num_bytes + sum(trainer_bytes(scene.sizes, trainer)))


def played(scene, places=64):
    """What is chosen of rollouts; without the trainer."""
    chosen = make_schedule(scene, [places])[0].rollout.chosen
    return dataclasses.replace(
        chosen, footprint=dataclasses.replace(chosen.footprint, trainer=0), moments=0
    )


def test_half_the_slots_on_whole_layers_beat_all_on_layers_that_are_cut():
    """Logits of 64 slots a device, three times in fp32, leave pages for 16 rows.

    Those of 32 leave room for all of these.
    """
    bare = slots_scene("('data=8','data=1,tensor=8')", 0)
    all_slots, half = (rollout_on(bare, D8, number, pages=32 * 4) for number in (512, 256))
    fewer = rollout_on(bare, D8, 512, pages=16 * 4)
    assert (all_slots.rows_at_once, half.rows_at_once, fewer.rows_at_once) == (32, 32, 16)
    logits, guests = 3 * 32 * 128_256 * 4, 32 * 64 * 16
    # What is read of the cache at a time, of 8 heads of 64 numbers, in fp32 and in bf16.
    blocks = 32 * 4 * 64 * 8 * 64 * 2
    beside_it = [p.footprint.activations for p in (all_slots, half)]
    assert beside_it[0] - beside_it[1] == logits + guests + blocks
    cut = rollout_on(bare, T8, 512)
    assert half.tokens_per_s > 1.3 * max(fewer.tokens_per_s, cut.tokens_per_s)
    assert played(beside_trainer(bare, fewer.footprint.total)) == half


def test_half_of_the_slots_are_taken_where_they_are_faster_beyond_noise():
    """Half of a layer on a device leaves room for all, and costs little: 4.8 %."""
    bare = slots_scene("('data=8','data=4,tensor=2')", 0)
    half, cut = rollout_on(bare, D8, 256), rollout_on(bare, D4T2, 512)
    assert 1.0 + NOISE < half.tokens_per_s / cut.tokens_per_s < 1.05
    fewer = rollout_on(bare, D8, 512, pages=16 * 4)
    assert played(beside_trainer(bare, fewer.footprint.total)) == half


def test_a_schedule_takes_fewer_slots_and_says_so():
    bare = slots_scene("('data=8',)", 0)
    trainer = sum(trainer_bytes(bare.sizes, MeshShape(fsdp=4, tensor=2)))
    scene = with_budget(bare, int(2.46 * GIB) + trainer)
    (stop,) = make_schedule(scene, [64])
    rung = stop.rollout.chosen.rung
    assert (rung.num_slots, rung.page_size, rung.offload) == (256, 16, False)
    # Rows of 64 tokens have four pages each, and a lane 32 of them.
    assert rung.pages == 32 * 4
    contexts = {64: 64}
    text = "\n".join(schedule_lines(scene, [stop], contexts))
    assert "  64: with 256 slots; no other mesh fits; here " in text
    assert "32 of 32" in text
    assert (
        "from the start: rollout data=8 (with 256 slots), train data=1,fsdp=4,tensor=2 (in" in text
    )
    (values,) = schedule_values(scene, [stop], contexts)["contexts"]
    (found,) = values["rollout"]["meshes"]
    assert (found["num_slots"], found["page_size"], found["moments_on_host"]) == (256, 16, False)


def test_pages_of_another_size_hold_as_many_tokens_and_are_taken_where_they_were_faster():
    """Of 1,100 tokens: nine pages of 128 for each of a lane's eight slots, or 576 of 16."""
    held = ("selector.rollout_meshes=('data=8',)", "rollout.page_size=128")
    scene = small_scene(*SMALL, *held, "selector.page_sizes=(16,)", "selector.hysteresis=0")
    ways = scene.ways_to_play(1100)
    assert ways[:2] == [RolloutRung(64, 72, False, 128), RolloutRung(64, 576, False, 16)]
    # At the end of the ladder a lane has pages for one episode.
    assert ways[-1] == RolloutRung(8, 72, False, 16)
    large, small = (on_rollout_rung(scene, way).work for way in ways[:2])
    a_token = row_bytes(scene.sizes, large, D8, 1) // 128
    assert row_bytes(scene.sizes, large, D8, 1100) == 1152 * a_token
    assert row_bytes(scene.sizes, small, D8, 1100) == 1104 * a_token
    # They are computed to be as fast: the config's stay, unless the others were measured.
    assert played(scene, 1100).rung == ways[0]
    speed = rollout_on(scene, D8, 64, 1100).tokens_per_s
    measured = Measurement(tokens_per_s=2 * speed, program_bytes=GIB, switch_s=0.0)
    known = {"rollout data=8 1100 page=16": measured}
    chosen = played(dataclasses.replace(scene, known=known), 1100)
    assert (chosen.rung, chosen.is_measured, chosen.exact) == (ways[1], True, True)
    assert chosen.tokens_per_s == 2 * speed


def test_a_page_is_cut_into_equal_parts_only():
    scene = scene_of("h100:1x8", "selector.page_sizes=(6,)")
    meshes = (MeshShape(data=8), MeshShape(data=2, context=4), MeshShape(data=4, context=2))
    scene = dataclasses.replace(scene, rollout_meshes=meshes)
    six = on_rollout_rung(scene, RolloutRung(64, 0, page_size=6))
    assert six.rollout_meshes == (meshes[0], meshes[2])


@pytest.mark.parametrize(("rows", "leave"), [(16, False), (64, True)])
def test_moments_leave_only_where_a_step_is_shorter_with_their_way_there_and_back(rows, leave):
    """Beside them whole layers have no room, and layers that are cut take twice as long.

    By hand: the way there and back takes 39 ms, which 64 rows of 64 tokens save, and 16 do not.
    """
    scene = small_scene(
        *SMALL[:2],
        f"rollout.episodes_per_step={rows}",
        "selector.rollout_meshes=('data=8','data=1,tensor=8')",
        "selector.train_meshes=('data=1,fsdp=8',)",
    )
    weights, moments = trainer_bytes(scene.sizes, MeshShape(fsdp=8))
    whole, cut = (rollout_on(scene, mesh, 64) for mesh in (D8, T8))
    away_s = 2 * moments / 64e9
    saved_s = rows * 64 / cut.tokens_per_s - rows * 64 / whole.tokens_per_s
    assert (saved_s > away_s) is leave
    tight = with_budget(scene, whole.footprint.total + weights + moments - 1)
    (stop,) = make_schedule(tight, [64])
    chosen = stop.rollout.chosen
    assert (chosen.mesh, chosen.offload) == ((D8, True) if leave else (T8, False))
    assert chosen.footprint.trainer == weights + (0 if leave else moments)
    step_s = rows * 64 / chosen.tokens_per_s + stop.train.chosen.seconds + chosen.move_s
    assert stop.step_s == pytest.approx(step_s)
    # Where there is room for both they stay.
    (roomy,) = make_schedule(with_budget(scene, tight.budget_bytes + 1), [64])
    assert (roomy.rollout.chosen.mesh, roomy.rollout.chosen.offload) == (D8, False)


def test_a_mesh_stays_within_the_hysteresis_and_its_slots_do_not():
    """Beyond 1,024 tokens tensor=4 is faster, by less than what a change must gain."""
    scene = scene_of(
        "h100:1x8",
        "model.preset=llama3.1-8b",
        "model.compute_dtype=bfloat16",
        "train.remat=True",
        "train.micro_batches=32",
        "rollout.num_slots=256",
        "rollout.episodes_per_step=256",
        "selector.train_meshes=('data=1,fsdp=8',)",
        "selector.rollout_meshes=('data=4,tensor=2','data=2,tensor=4')",
        "selector.offload=off",
        budget=int(37.22 * GIB),
        vocab_size=128_256,
    )
    stops = make_schedule(scene, [1024, 32_768])
    short, long = (stop.rollout for stop in stops)
    assert short.chosen.mesh == long.chosen.mesh == D4T2
    assert (short.chosen.rung.num_slots, long.chosen.rung.num_slots) == (256, 32)
    assert "faster, which is not enough" in stops[1].second
    other = next(p for p in long.prospects if p.mesh != D4T2)
    assert other.tokens_per_s > long.chosen.tokens_per_s
    # Without hysteresis it is gone to.
    settings = dataclasses.replace(scene.settings, hysteresis=0.0)
    eager = make_schedule(dataclasses.replace(scene, settings=settings), [1024, 32_768])
    assert eager[1].rollout.switched and eager[1].rollout.chosen.mesh == other.mesh


# Both.


def test_what_is_listed_goes_down_the_ladder_of_a_run():
    scene = dataclasses.replace(
        small_scene(*SMALL[:2], "train.micro_batches=16", budget=10 * GIB), by_speed=False
    )
    assert scene.ways_to_train == [
        TrainRung(16, False),
        TrainRung(16, True),
        TrainRung(32, True),
        TrainRung(64, True),
    ]
    # Pages for eight episodes a lane, four each; and then, without the moments, for fewer.
    assert [(way.num_slots, way.pages, way.offload) for way in scene.ways_to_play(64)] == [
        (64, 32, False),
        *((64, pages, True) for pages in (32, 16, 8, 4)),
        *((32, pages, True) for pages in (32, 16, 8, 4)),
        *((16, pages, True) for pages in (32, 16, 8, 4)),
        *((8, pages, True) for pages in (32, 16, 8, 4)),
    ]
    by_speed = dataclasses.replace(scene, by_speed=True, page_sizes=(32,))
    assert TrainRung(32, False) in by_speed.ways_to_train
    assert [(w.num_slots, w.pages, w.page_size, w.offload) for w in by_speed.ways_to_play(64)][
        :4
    ] == [
        (64, 32, 16, False),
        (64, 16, 32, False),
        (64, 32, 16, True),
        (64, 16, 32, True),
    ]


def test_a_compiler_is_asked_for_the_way_that_would_be_chosen():
    """One mesh: what takes more than was computed gives way to the next way."""
    scene = small_scene(*TWO_MESHES, "selector.train_meshes=('data=8',)", budget=60 * GIB)
    asked = []

    def exactly(prospect):
        asked.append(prospect.rung)
        more = 100 * GIB if prospect.rung == TrainRung(1, False) else 0
        footprint = dataclasses.replace(prospect.footprint, activations=GIB + more)
        return dataclasses.replace(prospect, exact=True, footprint=footprint)

    train = make_schedule(scene, [4096], exactly)[0].train
    assert asked[:2] == [TrainRung(1, False), TrainRung(2, False)]
    assert train.chosen.rung == TrainRung(2, False) and train.chosen.exact


def test_entries_of_a_table_count_for_the_way_that_they_name():
    scene = scene_of("h100:1x8", "selector.page_sizes=(8,)")
    update = update_on(scene, D8, 2, True, places=64)
    slots = rollout_on(scene, D8, 32, page_size=8)

    def factors(*entries):
        measured = {
            entry: Measurement(tokens_per_s=speed, program_bytes=1, switch_s=0.0)
            for entry, speed in entries
        }
        return calibrated(scene, measured).factors

    assert factors(
        ("train data=8 64 micro_batches=2,remat=True", update.tokens_per_s / 2),
        ("rollout data=8 64 slots=32,page=8", slots.tokens_per_s / 4),
    ) == {"train": pytest.approx(1 / 2), "rollout": pytest.approx(1 / 4)}
    for unknown in (
        "train data=8 64 micro_batches=3,remat=True",
        "train data=8 64 remat=maybe",
        "train data=8 64 layers=2",
        # One row at a time on each of eight devices is all that there is.
        "train data=8 64 micro_batches=16,remat=True",
        "rollout data=8 64 slots=48",
        "rollout data=8 64 slots=32,page=5",
        "rollout data=8 64 pages",
    ):
        assert factors((unknown, 1.0)) == {}


@pytest.mark.parametrize("seed", range(1, 12))
def test_nothing_that_fits_is_faster_than_what_is_chosen(seed):
    """Of all pairs, one by one: by more than noise, or by more than what keeps those in use."""
    draw = random.Random(seed)
    rows = 2 ** draw.randint(4, 7)
    scene = scene_of(
        draw.choice(["h100:1x8", "v5e:2x4", "h100:2x4"]),
        f"model.preset={draw.choice(['llama3.2-1b', 'qwen2.5-1.5b', 'llama3.2-3b'])}",
        "model.compute_dtype=bfloat16",
        f"rollout.num_slots={rows}",
        f"rollout.episodes_per_step={rows}",
        f"rollout.page_size={draw.choice([16, 64])}",
        f"selector.page_sizes={draw.choice([(), (32,), (128, 256)])}",
        f"selector.hysteresis={draw.choice([0.0, 0.02, 0.15, 0.5])}",
        "selector.horizon_steps=1000000000",
        f"train.remat={draw.choice([True, False])}",
        f"train.micro_batches={draw.choice([1, 2])}",
        budget=int(draw.uniform(5, 40) * GIB),
        vocab_size=2 ** draw.randint(10, 17),
    )
    noise = 1 + min(NOISE, scene.settings.hysteresis)
    rooms = sorted(draw.sample([32, 100, 512, 1500, 4096, 16_384, 40_000], 3))
    before = None
    for stop in make_schedule(scene, rooms):
        updates = [u for way in scene.ways_to_train for u in all_on(scene, way, stop.places)]
        assert stop.train.candidates == len(updates)
        ways = scene.ways_to_play(stop.places)
        rollouts = [rollout for way in ways for rollout in played_on(scene, way, ways[0], stop)]
        pairs = {
            (update, rollout): one
            for update in updates
            if update.footprint.total <= scene.budget_bytes
            for rollout, one in beside_it(scene, update, rollouts)
        }
        seconds = {pair: s for pair, (total, s) in pairs.items() if total <= scene.budget_bytes}
        if not seconds:
            least = min((total for total, _ in pairs.values()), default=None)
            nearest = stop.rollout.shortfall_bytes if stop.rollout else None
            assert not stop.fits and nearest == (least and least - scene.budget_bytes)
            continue
        update, rollout = stop.train.chosen, stop.rollout.chosen
        chosen = next(
            pair
            for pair in seconds
            if (pair[0].mesh, pair[0].rung, pair[1].mesh, pair[1].rung)
            == (update.mesh, update.rung, rollout.mesh, rollout.rung)
        )
        assert rollout.footprint.total == pairs[chosen][0]
        assert stop.step_s == pytest.approx(seconds[chosen])
        least_s = min(seconds.values())
        here_s = min((s for pair, s in seconds.items() if meshes(*pair) == before), default=None)
        if here_s is None or here_s > least_s * (1 + scene.settings.hysteresis):
            assert seconds[chosen] <= least_s * noise * (1 + 1e-9)
        else:
            assert meshes(*chosen) == before
            assert seconds[chosen] <= here_s * noise * (1 + 1e-9)
        before = meshes(*chosen)


def meshes(update, rollout):
    return rollout.mesh, update.mesh


def beside_it(scene, update, rollouts):
    """Each rollout with its bytes beside this trainer, and the seconds of their step."""
    rest, moments = trainer_bytes(scene.sizes, update.mesh)
    for rollout in rollouts:
        left, away_s = rest + moments, 0.0
        if rollout.offload:
            left, away_s = rest, 2 * moments / scene.hardware.host_bytes_per_s
        tokens = scene.work.num_rows * rollout.places
        rollout_s = tokens / rollout.tokens_per_s + rollout.move_s + away_s
        yield rollout, (rollout.footprint.total + left, update.seconds + rollout_s)


def played_on(scene, way, wanted, stop):
    """Every mesh in this way, by itself, with as many at work as have pages."""
    on_rung = on_rollout_rung(scene, way)
    busy = busy_slots(
        way.pages * way.page_size,
        wanted.pages * wanted.page_size,
        wanted.num_slots,
        way.num_slots,
    )
    found = on_rung.rollout_meshes_for(stop.places)
    return [rollout_prospect(on_rung, mesh, stop.places, way, busy) for mesh in found]


def all_on(scene, way, places):
    """Every mesh in this way, whether it fits or not."""
    on_rung = on_train_rung(scene, way)
    return [train_prospect(on_rung, mesh, places) for mesh in on_rung.train_meshes_for(places)]


def test_updates_that_are_left_out_do_not_fit_and_are_counted():
    scene = small_scene(*TWO_MESHES, budget=16 * GIB)
    every = [p for way in scene.ways_to_train for p in all_on(scene, way, 4096)]
    kept, number = train_contenders(scene, scene.ways_to_train, 4096)
    assert number == len(every) > len(kept)
    left = [p for p in every if p not in kept]
    assert left and all(p.footprint.total > scene.budget_bytes for p in left)
    # Of a mesh that does not fit the smallest is kept: here one micro-batch with remat.
    assert [p.rung for p in kept if p.mesh == D8] == [TrainRung(1, True)]


@pytest.mark.slow
def test_the_compiled_program_is_that_of_the_way():
    """Half the slots and other pages are another round, more micro-batches another update."""
    small = ("rollout.num_slots=32", "rollout.episodes_per_step=32", "model.num_layers=2")
    scene, config = scene_of("cpu:8", *small), make_config({}, small)
    exactly = compiler_for(scene, config, "cpu:8", 32)
    whole, other = (
        exactly(rollout_on(scene, D8, slots, 32, page_size=size))
        for slots, size in ((32, 16), (16, 64))
    )
    assert whole.exact and whole.rung == RolloutRung(32, 8, False, 16)
    # Half of the rows, each of 32 tokens, with pages for 64.
    assert other.footprint.cache == whole.footprint.cache
    assert other.footprint.activations < whole.footprint.activations
    plain, again = (exactly(update_on(scene, D8, 1, remat, places=32)) for remat in (False, True))
    assert again.footprint.total < plain.footprint.total
