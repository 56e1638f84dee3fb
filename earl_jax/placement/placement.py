# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Placement: the plans in use, what is known of plans, and recovery from a lack of memory."""

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax

from earl_jax.dispatch.packing import Shape, ShapeHistory
from earl_jax.launch.distributed import RestartNeeded
from earl_jax.placement.stages import Stages, compiled_bytes
from earl_jax.rollout.end import RolloutShort, Shortage
from earl_jax.rollout.events import Events
from earl_jax.selector.candidates import Candidate, Candidates
from earl_jax.selector.choose import HORIZON_STEPS, BudgetTooSmall, Decision, Step, choose_plans
from earl_jax.selector.memory import is_in_move, is_out_of_memory
from earl_jax.selector.plans import Plan, Plans, RolloutPlan, Stage, TrainPlan
from earl_jax.selector.table import ThroughputTable, key_of
from earl_jax.settings.errors import InputError
from earl_jax.telemetry.load import WINDOW, Load
from earl_jax.train.backup import StateBackup

Result = TypeVar("Result")
MayTry = Callable[[str], bool]
# A plan whose computed bytes are nearer to the budget is compiled before it is used. They have been
# a twelfth below XLA's (benchmarks/plan.md); on CPUs, whose programs are small, a half.
SURE, SURE_ON_CPU = 1.2, 1.5
# Programs of a stage that are compiled for their bytes, where another plan surely fits.
COMPILED_AT_MOST = 2
# Fields of a Placement in its `as_dict`.
_NUMBERS = ("max_tokens", "calm_steps", "most_tokens", "most_length")


@dataclasses.dataclass(kw_only=True)
class SwitchLog:
    """Changes since the last step was logged; `failures` say which plans ran out of memory."""

    choices: list[Candidate] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    switch_s: float = 0.0
    bytes_per_device: int = 0
    expected_s: float | None = None

    def metrics(self) -> dict[str, Any]:
        """Returns its part of a line of metrics."""
        newest = {choice.stage: choice for choice in self.choices}
        return {
            "switched": [choice.stage for choice in self.choices if choice.switched],
            "switch_notes": [str(choice) for choice in self.choices if choice.switched],
            "switch_s": self.switch_s,
            "decision": "; ".join(map(str, newest.values())),
            "expected_step_s": self.expected_s,
            "out_of_memory": self.failures or None,
            "peak_bytes_per_device": self.bytes_per_device,
        }


class Placement:
    """The plans in use. Host-side state only; `as_dict` has the part that a resumed run needs."""

    def __init__(
        self, stages: Stages, table: ThroughputTable, say: Callable[[str], None] = lambda text: None
    ) -> None:
        """Begins without plans; `say` reports what ran out of memory or could not be kept."""
        self.stages, self.problem = stages, stages.problem
        # Speeds of before are one of each plan, so that this run has to observe it twice.
        self.table = table.as_prior() if stages.feeds_table else table
        self._say = say
        self.plans = Plans()
        # The plan to which the last episodes of a rollout have moved.
        self.tail: RolloutPlan | None = None
        # Context buckets that the plans in use are for, and the largest that ever were.
        self.max_tokens = self.length = 0
        self.most_tokens = self.most_length = 0
        self.calm_steps = 0
        # Shapes of packed batches, by their context bucket, and the tokens of the last one.
        self.row_shapes: dict[str, ShapeHistory] = {}
        self.trained_tokens = 0
        # A rollout is beside the live episodes of another one, whose plans will be in use again.
        self.beside_live = False
        # The bucket of a rollout that ran out of memory: it is played again from the start.
        self.outgrown = 0
        self.backup = StateBackup(stages.cluster.count == 1 and stages.problem.holds_backup)
        # Rounds that the run has played, by `key_of`: other programs are compiled first.
        self.played = set[str]()
        # Where a run's choices are noted, or come again in a replay.
        self.events = Events()
        # CompileAhead.hand_over and .is_compiled, where a thread compiles ahead.
        self.about_to_use: Callable[[str], None] = lambda key: None
        self.is_compiled: Callable[[str], bool] = lambda key: False
        # CompileAhead.is_compiled: a plan that never ran may be tried, as nobody waits for its
        # program. On CPUs all may be. None: nothing is tried, as of several processes.
        is_cpu = stages.problem.hardware.platform == "cpu"
        tries_all = is_cpu and stages.cluster.count == 1
        self.may_try: MayTry | None = (lambda key: True) if tries_all else None
        self._sure = SURE_ON_CPU if is_cpu else SURE
        # Steps that the run has left; None: not known.
        self.steps_left: int | None = None
        self.log = SwitchLog()

    def as_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on choosing alike."""
        rollout, train = self.plans
        return {
            "rollout": rollout and rollout.as_list(),
            "train": train and train.as_list(),
            "row_shapes": {
                length: [each.wasted, *map(list, each.shapes)]
                for length, each in self.row_shapes.items()
            },
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Undoes `as_dict`. Raises ValueError where something is missing or no plan."""
        try:
            has_rollout = self.problem.plays or saved["rollout"]
            rollout = RolloutPlan.from_list(saved["rollout"]) if has_rollout else None
            train = TrainPlan.from_list(saved["train"])
            numbers = {name: int(saved[name]) for name in _NUMBERS}
            row_shapes = {
                length: ShapeHistory(
                    wasted=float(wasted), shapes=[Shape(*map(int, shape)) for shape in shapes]
                )
                for length, (wasted, *shapes) in saved["row_shapes"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"its placement is not one: {error}") from error
        self.plans, self.row_shapes = Plans(rollout, train), row_shapes
        for name, number in numbers.items():
            setattr(self, name, number)

    @property
    def rollout(self) -> RolloutPlan:
        """The rollout's plan in use; one must have been chosen."""
        assert self.plans.rollout is not None
        return self.plans.rollout

    @property
    def train(self) -> TrainPlan:
        """The trainer's plan in use; one must have been chosen."""
        assert self.plans.train is not None
        return self.plans.train

    @property
    def plays_together(self) -> bool:
        """True if the rollout's mesh spans processes, which then play the same episodes."""
        return self.stages.cluster.spans(self.rollout.mesh)

    @property
    def words(self) -> str:
        """The differences from the config for lack of memory, in words; "" for none."""
        rollout, train, work = self.plans.rollout, self.train, self.problem.work
        first = TrainPlan(train.mesh, work.micro_batches, work.remat)
        moments = "the optimizer's moments wait in host memory during rollouts"
        parts = []
        if rollout is not None:
            slots = f"rollout with {rollout.num_slots} of {work.num_slots} slots"
            parts = [moments] * rollout.offload + [slots] * (rollout.num_slots != work.num_slots)
        return "; ".join(parts + [f"training on {train.words(first)}"] * (train != first))

    @property
    def needed_tokens(self) -> int:
        """The longest context that the run came to, or must hold from the start."""
        if not self.problem.plays:
            return self._length_for(1)
        rollout = self.stages.rollout
        configured = min(rollout.context_buckets[-1], rollout.max_episode_tokens)
        return max(configured, self.max_tokens, self.outgrown)

    def end_warm_start(self) -> None:
        """Counts the moments of supervised updates no more: states have none from here on."""
        self.problem = self.problem.behind_warm_start()

    def take_log(self) -> SwitchLog:
        """Returns what changed since the last call."""
        log, self.log = self.log, SwitchLog()
        return log

    # Choosing.

    def choose_step(self, tokens: int, load: Load | None) -> Decision:
        """Chooses the plans of the next step, whose episodes may have `tokens` tokens.

        Where nothing fits the growth that is expected, contexts count as they are. Raises
        BudgetTooSmall where no plans are left, as all that choose.
        """
        try:
            return self.choose(self.step_of(tokens, load), load)
        except BudgetTooSmall:
            if load is None or not load.growth_tokens:
                raise
        growth = math.ceil(load.growth_tokens)
        shorter = dataclasses.replace(
            load, context_tokens_max=load.context_tokens_max - growth, growth_tokens=0.0
        )
        return self.choose(self.step_of(tokens - growth, shorter), shorter)

    def choose(self, step: Step, load: Load | None = None, only: Stage | None = None) -> Decision:
        """Chooses the plans of both stages, or of `only` one, and takes them into use."""
        before, decision = self.plans, self._settled(step, load, only)
        rollout, train = decision.plans
        switched = any(choice.switched for choice in decision.choices)
        self.plans = Plans(rollout or before.rollout, train or before.train)
        if only is None:
            stays = not switched and train == before.train
            self.calm_steps = self.calm_steps + 1 if stays else 0
            self.most_tokens = max(self.most_tokens, step.max_tokens)
            self.most_length = max(self.most_length, step.length)
            self.log.expected_s = decision.seconds
        elif switched:
            self.calm_steps = 0
        if only != "train" or switched or step.length > self.length:
            self.log.choices += decision.choices
            sizes = [choice.num_bytes for choice in decision.choices]
            self.log.bytes_per_device = max(self.log.bytes_per_device, *sizes)
        self.max_tokens = step.max_tokens if rollout else self.max_tokens
        self.length = step.length if train else self.length
        return decision

    def choose_split(self, tokens: int, load: Load | None) -> bool:
        """Chooses plans of both stages between two steps, for live episodes in their slots.

        Returns True where a stage is to move; its plans are in use then. Else nothing changes: as
        where nothing else fits, or plans would be left again within a window of steps.
        """
        step = self.step_of(max(tokens, self.max_tokens), load)
        if step.lasts < WINDOW and not step.is_new:
            return False
        step = dataclasses.replace(step, keeps_slots=True)
        before = self.as_dict()
        with contextlib.suppress(BudgetTooSmall):
            if any(choice.switched for choice in self.choose(step, load).choices):
                return True
        kept = ("calm_steps", "most_tokens", "most_length")
        self.restore(before | {name: getattr(self, name) for name in kept})
        return False

    def step_of(self, tokens: int, load: Load | None) -> Step:
        """Returns the work of a step whose episodes may have so many tokens."""
        rollout = self.stages.rollout
        max_tokens = max(rollout.max_tokens_for(tokens), self.outgrown)
        length = self._length_for(load.context_tokens_max if load else 1)
        # At first as much as all slots have in the first context bucket.
        first = rollout.num_slots * rollout.context_buckets[0]
        turns = rollout.episodes_per_step * rollout.max_turn_tokens
        return Step(
            max_tokens=max_tokens,
            length=length,
            cache_tokens=math.ceil(1.1 * load.tokens_in_flight_max) if load else first,
            rollout_tokens=load.rollout_tokens if load else turns,
            live=load and load.live,
            lasts=self._lasts(max_tokens, length, load),
            is_new=max_tokens > self.most_tokens or length > self.most_length,
            compile_s=self.table.compile_s if self.stages.feeds_table else 0.0,
        )

    def tokens_of(self, num_pages: int) -> int:
        """Returns the tokens that all slots' episodes have together in so many pages."""
        return self.problem.page_rule.tokens_in(num_pages, self.rollout.num_slots)

    def _lasts(self, max_tokens: int, length: int, load: Load | None) -> int:
        """Returns the steps until contexts outgrow these buckets, within horizon and run."""
        horizon = HORIZON_STEPS
        if self.steps_left is not None:
            horizon = max(1, min(horizon, self.steps_left))
        if load is None or load.growth_tokens <= 0:
            return horizon
        left = min(max_tokens, length) - load.context_tokens_max
        return max(1, min(horizon, math.ceil(left / load.growth_tokens)))

    def choose_training(self, load: Load | None = None) -> Decision:
        """Chooses a plan for rows as long as the longest of recent steps; no `load`: as before."""
        length = self.length
        if load is not None:
            length = self._length_for(load.context_tokens_max)
        step = dataclasses.replace(
            self.step_of(self.max_tokens, load), length=length, is_new=length > self.most_length
        )
        return self.choose(step, load, only="train")

    def _length_for(self, tokens: int) -> int:
        """Returns the context bucket of training rows, of episodes of so many tokens."""
        stages = self.stages
        longest = max(tokens, stages.example_tokens, stages.held_out_tokens)
        return stages.rollout.max_tokens_for(longest)

    def choose_rollout(self, tokens: int, load: Load | None) -> Decision:
        """Chooses a plan for a rollout beside the trainer; the one in use stays if it may."""
        return self.choose(self.step_of(tokens, load), load, only="rollout")

    def _settled(self, step: Step, load: Load | None, only: Stage | None) -> Decision:
        """Chooses until the chosen programs are known to fit; those in doubt are compiled.

        After COMPILED_AT_MOST rounds plans are chosen that surely fit, if any. Of several processes
        none compiles within a rollout, because the others would not know its bytes.
        """

        def chosen(caution: float = 1.0, may_try: MayTry | None = None) -> Decision:
            candidates = self.candidates(load, caution, may_try)
            return choose_plans(candidates, step, self.plans, self.calm_steps, only)

        # Trying a mesh takes a few steps and a compilation.
        tries = self.stages.feeds_table and only is None and step.lasts >= WINDOW
        # Between two steps, with live episodes too, all choose both stages' plans together.
        if step.keeps_slots and only is not None and self.stages.cluster.count > 1:
            return chosen()
        for _ in range(COMPILED_AT_MOST):
            decision = chosen(may_try=self.may_try if tries else None)
            if not self._compiled(decision):
                return decision
        with contextlib.suppress(BudgetTooSmall):
            return chosen(self._sure)
        while self._compiled(decision := chosen()):
            pass
        return decision

    def candidates(
        self, load: Load | None, caution: float = 1.0, may_try: MayTry | None = None
    ) -> Candidates:
        """Returns the candidates by what is known now; the arguments are theirs."""
        return Candidates(self.problem, self.table, caution, may_try, load)

    def _compiled(self, decision: Decision) -> bool:
        """Compiles the programs in doubt for their bytes; returns True if there were any."""
        budget = self.problem.budget
        doubted = [
            (choice.plan, choice.tokens)
            for choice in decision.choices
            if not choice.is_exact and self._sure * choice.num_bytes > budget
        ]
        for plan, tokens in doubted:
            num_bytes = compiled_bytes(self.stages, plan, tokens)
            if num_bytes is None:
                self._remember(plan, tokens)
            else:
                own_bytes = self.problem.without_pages(plan, num_bytes)
                self._keep(self.table.with_bytes(key_of(plan, tokens), own_bytes))
        return bool(doubted)

    # What is observed.

    def add_speed(self, plan: Plan, tokens: int, tokens_per_s: float | None) -> None:
        """Adds the speed of a step with a plan, unless None, to a table that is fed."""
        if self.stages.feeds_table and tokens_per_s:
            self._keep(self.table.with_speed(key_of(plan, tokens), tokens_per_s))

    def add_wait(self, compile_s: float) -> None:
        """Adds the seconds that a step waited for new programs."""
        if self.stages.feeds_table and compile_s:
            self._keep(self.table.with_wait(compile_s))

    def _keep(self, table: ThroughputTable) -> None:
        self.table = table
        try:
            table.write()
        except OSError as error:
            self._say(f"the throughput table cannot be kept for later runs: {error}")
            self.table = dataclasses.replace(table, path=None)

    # Recovery from a lack of memory.

    def attempt(
        self,
        stage: Literal["rollout", "train"] | None,
        work: Callable[[], Result],
        length: int | None = None,
        *,
        plan: TrainPlan | None = None,
        live: bool = False,
    ) -> Result | None:
        """Returns the result of `work`; None where the devices had too little memory for it.

        The size of the stage's plan is remembered then (`fail`). Choose again, and repeat the work
        from its inputs, which it must not have given up. A rollout that outgrew its plan, where
        none is left for its live episodes, is repeated too.

        Args:
            stage: the stage whose plan is in use; None: nothing is remembered.
            work: a function that waits for its arrays.
            length: the context bucket that is trained on, if not the chosen one.
            plan: the plan of an update with no larger micro-batches than the one in use.
            live: the work is that of one process within a rollout. Of several processes it raises
                the error, unless nothing is remembered and no other is in a program with it; the
                others are told at the rollout's end.

        Raises:
            BudgetTooSmall: no plan is left.
            RestartNeeded: of several processes this one failed in a program that they run together.
        """
        processes, result = self.stages.cluster, None
        try:
            result = work()
        except BudgetTooSmall:
            if live or stage != "rollout" or not self.outgrown:
                raise
        except RolloutShort as error:
            self._agree(error.shortage)
        except jax.errors.JaxRuntimeError as error:
            is_alone = processes.count == 1 or (live and stage is None and not self.plays_together)
            if not is_out_of_memory(error) or (live and not is_alone):
                raise
            if stage is not None:
                # A process that ends forgets what only this run knows.
                in_move = is_in_move(error) and processes.count == 1
                self.fail(stage, length, plan, in_move=in_move, live=live)
            if not is_alone:
                raise RestartNeeded(
                    f"{self.log.failures[-1]}; it is remembered, and not tried again"
                ) from error
        if result is None:
            # The arrays of the failed attempt are freed with its frames.
            gc.collect()
        if stage == "rollout" and not (live or self.beside_live):
            self._end_rollout(played=result is not None)
        return result

    def _end_rollout(self, *, played: bool) -> None:
        self.table = self.table.after_rollout()
        if played:
            self.outgrown, self.tail = 0, None

    def fail(
        self,
        stage: str,
        length: int | None = None,
        plan: TrainPlan | None = None,
        *,
        in_move: bool = False,
        live: bool = False,
    ) -> None:
        """Remembers that a stage's plan ran out of memory; the arguments are those of `attempt`.

        Later runs know it too, unless memory was short `in_move`, beside what was there before. If
        those were `live` episodes it is forgotten when their rollout ends.
        """
        how = {"in_move": in_move, "live": live or self.beside_live}
        if stage == "rollout":
            self.outgrown = self.max_tokens
            self._remember(self.tail or self.rollout, self.max_tokens, **how)
        else:
            self._remember(plan or self.train, length or self.length, **how)

    def _remember(
        self, plan: Plan, tokens: int, *, in_move: bool = False, live: bool = False
    ) -> None:
        lasts = ("rollout" if live else "run") if in_move else "always"
        failure = dataclasses.replace(self.problem.failure(plan, tokens), lasts=lasts)
        words = f"{failure.stage} on {failure.mesh} {failure}{', in the move there' * in_move}"
        self.log.failures.append(words)
        self._say(f"{words}; it is not tried again{f' in this {lasts}' * in_move}")
        self._keep(self.table.with_failure(failure))

    def shortage(self, error: Exception) -> Shortage | None:
        """Returns what the other processes must know of a rollout that ended with this error.

        None for an error that is no shortage, in a run of one process, and for a lack of memory of
        processes that play together.
        """
        failed, processes = is_out_of_memory(error), self.stages.cluster
        if processes.count == 1 or not (failed or isinstance(error, BudgetTooSmall)):
            return None
        if failed and self.plays_together:
            return None
        return Shortage(
            words=f"process {processes.index}: {str(error).splitlines()[0]}",
            failed=failed,
            placement=self.as_dict(),
            tail=self.tail and self.tail.as_list(),
            outgrown=self.outgrown,
        )

    def _agree(self, shortage: Shortage) -> None:
        """Takes over the placement of the process that was short, and remembers the same."""
        self.restore(shortage.placement)
        self.tail = RolloutPlan.from_list(shortage.tail) if shortage.tail else None
        self.outgrown = shortage.outgrown
        if shortage.failed:
            self.fail("rollout")
