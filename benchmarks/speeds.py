# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Published and measured speeds against the planner's roofline.

`python -m benchmarks.speeds` prints the tables of benchmarks/speeds.md; nothing is run on a chip.
Nothing in earl_jax/selector/roofline.py or hardware.py was fitted to the figures here.
"""

import dataclasses
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.pages import parser_of, table
from benchmarks.plan import sizes_of
from earl_jax.config.file import make_config
from earl_jax.placement.problem import make_problem
from earl_jax.selector.hardware import GPU_OP_S, IDEAL, Hardware, Kernels, parse_topology
from earl_jax.selector.plans import TrainPlan
from earl_jax.selector.problem import Problem
from earl_jax.selector.roofline import decode_s, train_parts
from earl_jax.selector.sizes import Workload
from earl_jax.settings.remat import Remat
from earl_jax.sharding.layout import MeshShape

_WORK = Workload(
    num_slots=1,
    num_rows=1,
    micro_batches=1,
    remat="none",
    logprob_chunk=512,
    chunk_size=1,
    append_tokens=256,
    appended=0.0,
    page_size=16,
    kv_itemsize=2,
)
# The FlashAttention-3 paper (arXiv 2407.08608, figures 5 and 6) as fractions of 989 TFLOP/s, by the
# arithmetic of hardware.IDEAL: forward 335 and 616 TFLOP/s; backward without a mask 322 and 561,
# with one in the ratio of the forward pass (335 of 370, 616 of 648).
FLASH_ATTENTION_2 = Kernels(attention_forward=0.34, attention_backward=0.29)
FLASH_ATTENTION_3 = Kernels(attention_forward=0.62, attention_backward=0.54)
# torchtitan's H100s: HBM2e with 2.4 TB/s, and 500 W for 700, of which the model knows nothing.
_GRAND_TETON = dataclasses.replace(parse_topology("h100:1x8"), memory_bytes_per_s=2.4e12)
_MANY_HOSTS = dataclasses.replace(parse_topology("h100:16x8"), memory_bytes_per_s=2.4e12)
# What Float8 makes of the products, by torchtitan's table 1: 32.8 us less for each token, of 89.4.
FLOAT8 = 0.63
# A Python engine: an operation's least time, and 1 ms on the host between steps. vLLM took 2.5
# times as long as one kernel of 0.95 ms for a token of Llama 3.2 1B (the page that GPU_OP_S is
# from): 0.93 ms of weights, 16 x 7 operations, and the host.
_VLLM, _VLLM_STEP_S = dataclasses.replace(IDEAL, op_s=GPU_OP_S), 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainPoint:
    """A published speed of training, in tokens per second and device."""

    name: str
    hardware: Hardware
    model: str
    mesh: MeshShape
    rows: int
    length: int
    published: float
    kernels: Kernels
    remat: Remat = "full"
    recomputed: float | None = None
    products: float = 1.0
    frozen: bool = False

    @property
    def computed(self) -> float:
        """Tokens per second and device as the model computes them."""
        hardware = dataclasses.replace(self.hardware, kernels=self.kernels)
        work = dataclasses.replace(_WORK, num_rows=self.rows, remat=self.remat)
        sizes = sizes_of(self.model)
        if self.frozen:
            sizes = dataclasses.replace(sizes, frozen=sizes.trained, trained=(), moments=())
        parts = train_parts(hardware, sizes, work, self.mesh, self.length, self.recomputed)
        parts = dataclasses.replace(parts, products_s=self.products * parts.products_s)
        return self.rows * self.length / parts.total / self.mesh.num_devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePoint:
    """A published speed of decoding, in tokens per second of all devices."""

    name: str
    hardware: Hardware
    model: str
    mesh: MeshShape
    rows: int
    context: int
    published: float
    kernels: Kernels
    host_step_s: float = 0.0

    @property
    def computed(self) -> float:
        """Tokens per second as the model computes them."""
        hardware = dataclasses.replace(self.hardware, kernels=self.kernels)
        sizes = sizes_of(self.model)
        step = decode_s(hardware, sizes, _WORK, self.mesh, self.rows, self.context)
        return self.rows / (step.total + self.host_step_s)


def _one_host(context: int, published: float) -> TrainPoint:
    """A row of torchtitan's table 2: a row of 32K tokens a device, Float8, all recomputed."""
    return TrainPoint(
        name=f"torchtitan, FSDP {8 // context}, CP {context}, Float8",
        hardware=_GRAND_TETON,
        model="llama3.1-8b",
        mesh=MeshShape(fsdp=8 // context, context=context),
        rows=8 // context,
        length=32768 * context,
        published=published,
        kernels=FLASH_ATTENTION_2,
        products=FLOAT8,
    )


def _fsdp(hardware: Hardware, published: float) -> TrainPoint:
    """A row of torchtitan's tables 1 and 3: rows of 8K in pairs, every other product recomputed."""
    devices = hardware.num_devices
    return TrainPoint(
        name=f"torchtitan, FSDP {devices}, compiled",
        hardware=hardware,
        model="llama3.1-8b",
        mesh=MeshShape(fsdp=devices),
        rows=2 * devices,
        length=8192,
        published=published,
        kernels=FLASH_ATTENTION_2,
        remat="none",
        recomputed=0.5,
    )


def _one_h100(name: str, model: str, length: int, published: float) -> TrainPoint:
    """A speed of prime-rl on one H100: all recomputed, FlashAttention-3."""
    return TrainPoint(
        name=f"prime-rl, {name}",
        hardware=parse_topology("h100:1x1"),
        model=model,
        mesh=MeshShape(),
        rows=1,
        length=length,
        published=published,
        kernels=FLASH_ATTENTION_3,
        frozen="LoRA" in name,
    )


TRAINING = (
    _fsdp(_GRAND_TETON, 6667),
    _fsdp(_MANY_HOSTS, 6514),
    _one_host(1, 3890),
    _one_host(2, 2540),
    _one_host(4, 1071),
    _one_host(8, 548),
    # 45 % of 918 TFLOP/s, where a token is six operations a parameter and attention without a mask.
    TrainPoint(
        name="MaxText, v6e-256",
        hardware=parse_topology("v6e:16x16"),
        model="llama3.1-8b",
        mesh=MeshShape(fsdp=256),
        rows=3 * 256,
        length=8192,
        published=0.45 * 918e12 / (6 * 8.03e9 + 12 * 32 * 4096 * 8192),
        kernels=IDEAL,
    ),
    _one_h100("supervised", "qwen3-0.6b", 16384, 25500),
    _one_h100("RL", "qwen3-0.6b", 16384, 11900),
    # 37 % of 989 TFLOP/s, where a token is six operations a parameter and causal attention.
    _one_h100("LoRA", "qwen3-4b", 65536, 0.37 * 989e12 / (6 * 4.02e9 + 6 * 36 * 4096 * 65536)),
)


def _stream_rl(rows: int, published: float) -> DecodePoint:
    """StreamRL's figure 6: a 7B model on one H800; the contexts are not given, 2K is a guess."""
    return DecodePoint(
        name="StreamRL figure 6, H800",
        hardware=parse_topology("h100:1x1"),
        model="qwen2.5-7b",
        mesh=MeshShape(),
        rows=rows,
        context=2048,
        published=published,
        kernels=_VLLM,
        host_step_s=_VLLM_STEP_S,
    )


DECODING = (
    _stream_rl(1, 119),
    _stream_rl(64, 5500),
    _stream_rl(128, 8400),
    _stream_rl(256, 11900),
    _stream_rl(512, 13900),
    DecodePoint(
        name="vLLM 0.19, H100, lightly loaded",
        hardware=parse_topology("h100:1x1"),
        model="qwen3-0.6b",
        mesh=MeshShape(),
        rows=1,
        context=576,
        published=1 / 2.4e-3,
        kernels=_VLLM,
        host_step_s=_VLLM_STEP_S,
    ),
    # 85 % of the memory's rate: weights in bf16 and a cache of 1K a row, a sixteenth on each chip.
    DecodePoint(
        name="jax-llm-examples, v5e-16",
        hardware=parse_topology("v5e:4x4"),
        model="llama3.1-70b",
        mesh=MeshShape(tensor=16),
        rows=8,
        context=1024,
        published=8 / ((139.0e9 + 8 * 1024 * 327_680) / 16 / (0.85 * 819e9)),
        kernels=IDEAL,
    ),
)


# Tokens per second of steps of the tic-tac-toe config on 8 virtual devices, by mesh.
TINY = Path(__file__).parent.parent / "configs" / "tictactoe_tiny_cpu.py"
TINY_MAX_TOKENS = 24
TINY_VOCAB = 24
MEASURED_ROLLOUTS = {"data=8": 22054, "data=4,tensor=2": 16585}
MEASURED_UPDATES = {"data=8": 34788, "data=1,fsdp=8": 44696}


def cpu_problem(path: Path = TINY) -> Problem:
    """Returns the problem of a config on eight virtual CPU devices."""
    config = make_config(runpy.run_path(str(path))["get_config"]())
    hardware = parse_topology("cpu:8")
    budget = hardware.usable_bytes
    return make_problem(config, config.model, TINY_VOCAB, hardware, budget_bytes=budget)


def rollout_speed(problem: Problem, mesh: str, max_tokens: int) -> float:
    """Tokens per second that all slots sample."""
    shape, work = MeshShape.parse(mesh), problem.work
    rows = work.num_slots // shape.data
    return problem.round_speed(shape, work.num_slots, max_tokens, rows, work.appended)


def update_speed(problem: Problem, mesh: str, max_tokens: int) -> float:
    """Tokens per second that an update learns from."""
    work = problem.work
    plan = TrainPlan(MeshShape.parse(mesh), work.micro_batches, work.remat)
    return problem.update_speed(plan, max_tokens)


def _point_rows(points: Sequence[TrainPoint | DecodePoint]) -> Iterator[list[str]]:
    for point in points:
        is_decoding = isinstance(point, DecodePoint)
        size = f"{point.rows} x {point.context:,}" if is_decoding else f"{point.length:,}"
        figures = [f"{point.published:,.0f}", f"{point.computed:,.0f}"]
        yield [point.name, point.model, size, *figures, f"{point.computed / point.published:.2f}"]


def _engine_rows() -> Iterator[list[str]]:
    sizes, hardware = sizes_of("qwen2.5-7b"), parse_topology("h100:1x1")
    ideal = dataclasses.replace(hardware, kernels=IDEAL)
    in_place = dataclasses.replace(_WORK, in_place_contexts=(1,))
    for rows, context in ((8, 1024), (8, 32768), (32, 8192), (128, 4096)):
        times = [
            1e3 * decode_s(each, sizes, work, MeshShape(), rows, context).total
            for each, work in ((ideal, _WORK), (hardware, in_place), (hardware, _WORK))
        ]
        yield ["decode", f"{rows} x {context:,}", *(f"{one:.1f} ms" for one in times)]
    sizes, hardware = sizes_of("llama3.1-8b"), parse_topology("h100:1x8")
    ideal = dataclasses.replace(hardware, kernels=IDEAL)
    for length, mesh in ((32768, MeshShape(context=8)), (131072, MeshShape(context=8))):
        work = dataclasses.replace(_WORK, remat="full")
        times = [train_parts(each, sizes, work, mesh, length).total for each in (ideal, hardware)]
        yield [f"update, {mesh}", f"1 x {length:,}", *(f"{one:.2f} s" for one in times), ""]


def _cpu_rows() -> Iterator[list[str]]:
    problem = cpu_problem()
    for stage, measured, speed in (
        ("rollout", MEASURED_ROLLOUTS, rollout_speed),
        ("update", MEASURED_UPDATES, update_speed),
    ):
        for mesh, found in measured.items():
            predicted = speed(problem, mesh, TINY_MAX_TOKENS)
            yield [stage, mesh, f"{found:,}", f"{predicted:,.0f}", f"{predicted / found:.2f}"]


def main() -> None:
    """Runs the command."""
    parser_of(__doc__, writes=False).parse_args()
    print_tables()


def print_tables() -> None:
    """Prints all tables."""
    compared = "published | computed | computed / published"
    for header, rows in (
        (f"training | model | tokens a row | {compared}", _point_rows(TRAINING)),
        (f"decoding | model | rows x context | {compared}", _point_rows(DECODING)),
        ("stage | rows x tokens | ideal kernels | ours | ours, pages gathered", _engine_rows()),
        ("stage | mesh | measured | predicted | ratio", _cpu_rows()),
    ):
        names = header.split(" | ")
        print(table([dict(zip(names, row, strict=True)) for row in rows]), end="\n\n")


if __name__ == "__main__":
    main()
