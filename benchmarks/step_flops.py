# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
r"""Operations and bytes of an update as the chip's own compiler makes it, without the chip.

    uv run --python=3.12 --extra=tpu-topology --extra=gpu-topology --extra=tokamax \
        python -m benchmarks.step_flops [--only=TEXT]

Compiles the update of Llama 3.2 1B (gradient of one row, AdamW, fp32 masters, bf16 compute), and
counts the operations of its matrix products and the bytes that each instruction moves, as often as
it runs (hlo.py). Attention kernels count by their blocks. Beside them are the operations that the
mathematics needs: 6 for each parameter of a matrix and token, and 12 for each pair of tokens, head
and size of a head in a layer, a query with the keys of its document up to itself.

"operations" and "bytes" are the seconds of all of them by the chip's peak and by its memory's rate.
"one by one" is the sum of the longer of both of each instruction, one behind the other. The highest
share is that of the peak which the needed operations reach in this time.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.chip import parameters_of
from benchmarks.compile import config_of, lower, print_each, vocab_size
from benchmarks.hlo import (
    Instruction,
    Program,
    bytes_accessed,
    flops,
    parts,
    read_program,
    runs,
    xla_analysis,
)
from benchmarks.plan import GIB, Point
from earl_jax.selector.memory import program_bytes
from earl_jax.sharding.layout import TRAINING_ROWS, MeshShape, make_layout
from earl_jax.sharding.topology import Chip, make_topology

MODEL = "llama3.2-1b"
# A host of v5p has four chips; each has a row of its own.
CHIPS = (("h100:1x1", MeshShape()), ("v5p:2x2x1", MeshShape(data=4)))
# Of a row of 32,768 tokens an H100 has no memory for what an update without remat keeps.
PROGRAMS = ((8192, "update, no remat"), (32768, "update"))
POINTS = [
    Point(MODEL, chip, program, mesh, 1, length, 0.0)
    for chip, mesh in CHIPS
    for length, program in PROGRAMS
]
POINTS += [
    point._replace(program=f"{point.program}, triton")
    for point in POINTS
    if point.topology.startswith("h100")
]
# Documents of a packed row, of equal length.
DOCUMENTS = 8


class Kernel(NamedTuple):
    """An attention kernel: `products` for each pair of a block of queries and one of keys.

    It leaves out blocks of keys behind its queries if `skips_future`, and those of other documents
    if `skips_documents`.
    """

    products: int
    queries: int
    keys: int
    skips_future: bool
    skips_documents: bool


def kernel_of(call: Instruction) -> Kernel | None:
    """Returns the attention kernel that an instruction calls; None for any other instruction.

    Forward a kernel makes two products; backward one makes three for the gradient of the queries,
    and another four for those of keys and values, as both make the scores again.
    """
    if call.kind != "custom-call":
        return None
    if "splash_" in call.name:
        number = 4 if "_dkv" in call.name else 3 if "_dq" in call.name else 2
        return Kernel(number, 512, 512, skips_future=True, skips_documents=True)
    if "/rows_" in call.op_name:
        number = 4 if "_keys" in call.op_name else 3 if "_queries" in call.op_name else 2
        return Kernel(number, 128, 64, skips_future=True, skips_documents=True)
    if "mosaic_gpu" in call.attributes:
        # Forward has the queries, keys, values and ranges of keys; backward gradients too.
        if len(call.operands) < 8:
            return Kernel(2, 128, 128, skips_future=True, skips_documents=True)
        number = 3 if len(call.results) == 1 else 4
        return Kernel(number, 128, 64, skips_future=True, skips_documents=False)
    return None


def pairs(kernel: Kernel, lengths: Sequence[int]) -> int:
    """Returns the pairs of a query and a key that a kernel computes for documents of these lengths.

    They follow each other in one row.
    """
    row = sum(lengths)
    begins = np.repeat(np.cumsum(lengths) - lengths, lengths).tolist()
    total = 0
    for start in range(0, row, kernel.queries):
        end = min(start + kernel.queries, row)
        first = begins[start] if kernel.skips_documents else 0
        last = end if kernel.skips_future else row
        blocks = -(-last // kernel.keys) - first // kernel.keys
        total += (end - start) * blocks * kernel.keys
    return total


def needed_flops(point: Point, lengths: Sequence[int]) -> tuple[int, int]:
    """Returns the operations that a row of such documents needs: of matrices, and of attention."""
    model = config_of(point)
    matrices = parameters_of(point.model) + model.width * vocab_size(point)
    looked_at = sum(length * (length + 1) // 2 for length in lengths)
    attention = 12 * model.num_layers * model.num_heads * model.head_size * looked_at
    return 6 * matrices * sum(lengths), attention


class Counts(NamedTuple):
    """Operations and bytes of a program on a device.

    `products` are operations of matrix products in its text, of which `again` are of a forward pass
    that the backward pass repeats. `kernels` are those of attention kernels, by packing. In
    `one_by_one_s` each instruction takes the longer of its operations and its bytes.
    """

    products: int
    again: int
    kernels: dict[str, int]
    calls: dict[str, int]
    moved: int
    one_by_one_s: float


def count(program: Program, chip: Chip, point: Point) -> Counts:
    """Returns the counts of an update of this point."""
    model, packings = config_of(point), packings_of(point)
    # A head of 64 is filled up with zeros for a TPU's kernel.
    size = model.head_size if chip.platform == "gpu" else max(model.head_size, 128)
    kernels, calls = collections.Counter[str](), collections.Counter[str]()
    made = again = moved = 0
    one_by_one_s = 0.0
    for run in runs(program):
        operations = 0
        for part in parts(program, run):
            number = flops(part)
            operations += number
            made += run.times * number
            again += run.times * number * ("rematted_computation" in part.instruction.op_name)
            if kernel := kernel_of(part.instruction):
                calls[f"{kernel.products} products"] += run.times
                each = 2 * kernel.products * model.num_heads * size
                for name, lengths in packings.items():
                    kernels[name] += run.times * each * pairs(kernel, lengths)
                operations += each * pairs(kernel, packings["one"])
        accessed = bytes_accessed(program, run)
        moved += run.times * accessed
        longer_s = max(operations / chip.bf16_flops_per_s, accessed / chip.hbm_bytes_per_s)
        one_by_one_s += run.times * longer_s
    return Counts(made, again, dict(kernels), dict(calls), moved, one_by_one_s)


def packings_of(point: Point) -> dict[str, list[int]]:
    """Returns the lengths of a row's documents: of one, and of several."""
    return {"one": [point.length], "several": [point.length // DOCUMENTS] * DOCUMENTS}


def measure(point: Point) -> dict[str, Any]:
    """Compiles the update in this process, and counts."""
    import jax

    jax.config.update("jax_platforms", "cpu")

    topology = make_topology(point.topology)
    chip = topology.chip
    layout = make_layout(point.mesh, topology.devices(), row_axes=TRAINING_ROWS)
    lowered, attention = lower(point, layout)
    compiled = lowered.compile()
    counts = count(read_program(compiled.as_text()), chip, point)
    analysis = xla_analysis(compiled, chip.platform)
    needed = {name: needed_flops(point, each) for name, each in packings_of(point).items()}
    made = counts.products + counts.kernels.get("one", 0)
    return counts._asdict() | {
        "attention": attention,
        "needed": needed,
        "compute_s": made / chip.bf16_flops_per_s,
        "memory_s": counts.moved / chip.hbm_bytes_per_s,
        "share": sum(needed["one"]) / chip.bf16_flops_per_s / counts.one_by_one_s,
        "xla_flops": analysis["flops"],
        "xla_bytes": analysis["bytes accessed"],
        "program": program_bytes(compiled),
    }


def main() -> None:
    """Compiles the points one after the other and prints the table."""
    header = "| model | topology | program | mesh | row | attention | products, TFLOP |"
    header += " of these again | kernels, TFLOP | needed, TFLOP | compiled / needed |"
    header += " with 8 documents | moved, GB | operations | bytes | one by one | highest share |"
    header += " XLA: TFLOP, GB | GiB |"
    print_each("benchmarks.step_flops", __doc__ or "", header, POINTS, measure, _cells)


def _cells(found: dict[str, Any]) -> list[str]:
    def tera(number: float) -> str:
        return f"{number / 1e12:.1f}"

    ratios = [
        (found["products"] + found["kernels"][name]) / sum(found["needed"][name])
        for name in ("one", "several")
    ]
    return [
        found["attention"],
        tera(found["products"]),
        f"{found['again'] / found['products']:.0%}",
        tera(found["kernels"]["one"]),
        " + ".join(map(tera, found["needed"]["one"])),
        *(f"{ratio:.2f}" for ratio in ratios),
        f"{found['moved'] / 1e9:.0f}",
        *(f"{1e3 * found[name]:.0f} ms" for name in ("compute_s", "memory_s", "one_by_one_s")),
        f"{found['share']:.0%}",
        f"{tera(found['xla_flops'])}, {found['xla_bytes'] / 1e9:.0f}",
        f"{found['program'] / GIB:.1f}",
    ]


if __name__ == "__main__":
    main()
