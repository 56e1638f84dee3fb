# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The text of a compiled program: its instructions, how often they run, and what they cost. Pure.

Serves step_flops.py and decode_bytes.py.

Operations are those of matrix products, a multiplication and an addition each. Bytes are those
that an instruction moves from and to the device's memory: operands and results, of a slice what is
cut out, of an update in place what is written, and nothing for what is kept in a core's own memory
(`S(1)` in a layout of a TPU's). XLA's own analysis counts the body of a loop once; here it counts
as often as it runs.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# Instructions that move nothing by themselves: names for a buffer, and what runs others.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier while conditional "
    "call async partition-id replica-id".split()
)
# The second half of an instruction that runs beside others.
_ENDS = ("-done", "-update")
# Instructions that a fusion computes for the elements alone that it needs.
_BY_ELEMENT = frozenset(("bitcast", "convert", "copy", "reshape", "transpose"))
_CUTS = frozenset(("slice", "dynamic-slice", "gather"))
_TYPE = re.compile(r"(\w+)\[([\d,<=]*)\](\{[^{}]*\})?")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(
    r"(?:body|to_apply|calls|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_GEMM = re.compile(r'custom_call_target="__cublas\$(?:lt\$matmul|gemm)')


class Array(NamedTuple):
    """The type, the shape, and the place of an array: in the device's memory or not."""

    kind: str
    shape: tuple[int, ...]
    in_memory: bool = True

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of all elements, without padding; 0 of a token."""
        bits = re.search(r"\d+", self.kind)
        return self.size * int(bits[0] if bits else 8 * (self.kind == "pred")) // 8


class Instruction(NamedTuple):
    """An instruction: `results` are the arrays of its type, `attributes` all behind its operands.

    Of a parameter `operands` are its number.
    """

    name: str
    kind: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def work(self) -> str:
        """The kind of what it does, also where it only starts it ("copy-start": "copy")."""
        return self.kind.removesuffix("-start")

    @property
    def num_bytes(self) -> int:
        """The bytes of all results."""
        return sum(result.num_bytes for result in self.results)

    @property
    def called(self) -> list[str]:
        """The names of the computations that it runs, but the condition of a loop."""
        found = _CALLED.findall(self.attributes)
        return [name.lstrip("%") for each in found for name in re.findall(r"%?[\w.\-]+", each)]

    @property
    def op_name(self) -> str:
        """The place in the traced program, such as "jit(step)/transpose(jvp())/dot_general"."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


Computation = Mapping[str, Instruction]


class Program(NamedTuple):
    """Computations by name, each with its instructions by name; `entry` is what runs first."""

    computations: Mapping[str, Computation]
    entry: str

    @property
    def instructions(self) -> list[Instruction]:
        """The instructions of all computations."""
        return [each for some in self.computations.values() for each in some.values()]


def read_program(text: str) -> Program:
    """Returns the program of a text, as `compiled.as_text()` has it."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current[found[2]] = _instruction(line[found.end() :], found[2], bool(found[1]))
    return Program(computations, entry)


def _instruction(text: str, name: str, is_root: bool) -> Instruction:
    # The type of several results stands in parentheses, which layouts have too.
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    kind, rest = text[end:].strip().split("(", 1)
    behind = _closing("(" + rest)
    inside, attributes = rest[: behind - 1], rest[behind:]
    operands = re.findall(r"%([\w.\-]+)", inside) or re.findall(r"[\w.\-]+", inside)
    results = [
        Array(
            of, tuple(int(n) for n in shape.replace("<=", "").split(",") if n), not _apart(layout)
        )
        for of, shape, layout in _TYPE.findall(text[:end])
    ]
    if kind == "copy-start":
        # Behind it are its source and a context.
        results = results[:1]
    elif kind.endswith("-start") and kind != "async-start":
        # Between its operands and a context.
        results = results[len(operands) : len(operands) + 1]
    return Instruction(name, kind, tuple(results), tuple(operands), attributes, is_root)


def _apart(layout: str) -> bool:
    """Returns True for the layout of an array that is not in the device's main memory."""
    return re.search(r"S\([1-9]", layout) is not None


def _closing(text: str) -> int:
    """Returns the place of the parenthesis that closes the first one."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return place
    raise ValueError(f"no parenthesis closes the first one of {text[:80]!r}")


class Run(NamedTuple):
    """An instruction of `computation` that runs `times` times; a fusion is one instruction."""

    times: int
    instruction: Instruction
    computation: Computation


def runs(program: Program) -> Iterator[Run]:
    """Yields what a program runs: all branches of a conditional, a loop's body at its trip count.

    Raises:
        ValueError: a loop's number of trips depends on data.
    """
    return _runs(program, program.entry, 1)


def _runs(program: Program, name: str, times: int) -> Iterator[Run]:
    computation = program.computations[name]
    for each in computation.values():
        yield Run(times, each, computation)
        if each.work in ("while", "conditional", "call", "async"):
            often = times * (trips(program, each) if each.kind == "while" else 1)
            for called in each.called:
                yield from _runs(program, called, often)


def trips(program: Program, loop: Instruction) -> int:
    """Returns the number of trips of a loop, which XLA noted or which its condition compares with.

    Raises:
        ValueError: it depends on data.
    """
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(noted[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
    inside = program.computations[condition[1]] if condition else {}
    numbers = [each for each in inside.values() if each.kind == "constant"]
    if len(numbers) == 1 and numbers[0].operands[0].isdigit():
        return int(numbers[0].operands[0])
    raise ValueError(f"the trips of loop {loop.name} depend on data")


def parts(program: Program, run: Run) -> Iterator[Run]:
    """Yields the instructions inside a fusion, and any other instruction as it is."""
    if run.instruction.work != "fusion":
        yield run
        return
    for name in run.instruction.called:
        inside = program.computations[name]
        for each in inside.values():
            yield from parts(program, Run(run.times, each, inside))


def flops(run: Run) -> int:
    """Returns the operations of one run of a matrix product; 0 of any other instruction.

    So they are 0 of a fusion, whose `parts` are asked, and of a kernel, whose arithmetic is not in
    the program's text.
    """
    instruction, computation = run.instruction, run.computation
    kind = instruction.work
    if kind == "convolution":
        return _convolution_flops(computation, instruction)
    if kind != "dot" and not _GEMM.search(instruction.attributes):
        return 0
    # Of a library's product the sizes are in its settings.
    axes = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]([\d",]*)', instruction.attributes)
    assert axes, instruction
    [left, *_] = computation[instruction.operands[0]].results
    summed = math.prod(left.shape[int(axis)] for axis in re.findall(r"\d+", axes[1]))
    return 2 * instruction.results[0].size * summed


def _convolution_flops(computation: Computation, instruction: Instruction) -> int:
    """Returns the operations of a convolution, as which TPUs compute every matrix product.

    Padding and gaps cost nothing.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels, instruction
    left, right = (computation[name].results[0].shape for name in instruction.operands[:2])
    out = instruction.results[0].shape
    settings = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    window = dict(each.split("=") for each in settings[1].split()) if settings else {}
    axes = sorted(letter for letter in labels[3] if letter.isdigit())

    def setting(name: str, place: int, without: str) -> str:
        return window[name].split("x")[place] if name in window else without

    pairs = 1
    for place, axis in enumerate(axes):
        size, taps, given = (
            shape[names.index(axis)]
            for shape, names in zip(
                (out, right, left), (labels[3], labels[2], labels[1]), strict=True
            )
        )
        step, gap, spread = (
            int(setting(name, place, "1")) for name in ("stride", "rhs_dilate", "lhs_dilate")
        )
        before = int(setting("pad", place, "0_0").split("_")[0])
        reached = (at * step + tap * gap - before for at in range(size) for tap in range(taps))
        pairs *= sum(0 <= at <= (given - 1) * spread and not at % spread for at in reached)
    features = out[labels[3].index("b")] * out[labels[3].index("f")]
    return 2 * pairs * features * right[labels[2].index("i")]


def bytes_accessed(program: Program, run: Run) -> int:
    """Returns the bytes that one run reads from and writes to the device's memory.

    A kernel reads its operands once, and writes its results.
    """
    _, instruction, computation = run
    is_free = instruction.work in _FREE or instruction.kind.endswith(_ENDS)
    if is_free or 'custom_call_target="AllocateBuffer"' in instruction.attributes:
        return 0
    read = sum(
        _read(program, computation, instruction, place)
        for place, name in enumerate(instruction.operands)
        if name in computation and all(one.in_memory for one in computation[name].results)
    )
    return read + _written(program, computation, instruction)


def _read(program: Program, computation: Computation, user: Instruction, place: int) -> int:
    """Returns the bytes that `user` reads of one of its operands."""
    size = computation[user.operands[place]].num_bytes
    if user.work in _CUTS and place == 0:
        return min(size, user.num_bytes)
    if place == 0 and user.work in ("dynamic-update-slice", "scatter"):
        # In place: what is added to is read, what is replaced is not.
        return _update(computation, user) * (user.work == "scatter")
    if user.work == "fusion":
        inside = program.computations[user.called[0]]
        [parameter] = [
            each
            for each in inside.values()
            if each.kind == "parameter" and each.operands[0] == str(place)
        ]
        return min(size, _passed(program, inside, parameter))
    return size


def _passed(program: Program, inside: Computation, given: Instruction) -> int:
    """Returns the bytes that the instructions of a fusion read of one of them."""
    read = 0
    for user in inside.values():
        if user.kind == "parameter" or given.name not in user.operands:
            continue
        if user.kind in _BY_ELEMENT and not user.is_root:
            read += _passed(program, inside, user) * given.num_bytes // max(1, user.num_bytes)
        else:
            operands = [place for place, name in enumerate(user.operands) if name == given.name]
            read += sum(_read(program, inside, user, place) for place in operands)
    return min(read, given.num_bytes)


def _update(computation: Computation, instruction: Instruction) -> int:
    """Returns the bytes of what is written into an array in place."""
    place = 1 if instruction.work == "dynamic-update-slice" else -1
    return computation[instruction.operands[place]].num_bytes


def _written(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Returns the bytes that an instruction writes to the device's memory."""
    kept = [result.in_memory for result in instruction.results]
    if _GEMM.search(instruction.attributes):
        # Not the workspace behind its result.
        return instruction.results[0].num_bytes
    if instruction.work in ("dynamic-update-slice", "scatter"):
        return _update(computation, instruction) * all(kept)
    if instruction.work == "fusion":
        inside = program.computations[instruction.called[0]]
        [root] = [each for each in inside.values() if each.is_root]
        parts = [inside[name] for name in root.operands] if root.kind == "tuple" else [root]
        if len(parts) == len(kept):
            each = zip(parts, kept, strict=True)
            return sum(_made(program, inside, part) for part, is_kept in each if is_kept)
    return sum(result.num_bytes * result.in_memory for result in instruction.results)


def _made(program: Program, inside: Computation, part: Instruction) -> int:
    """Returns the bytes that a fusion writes for one of its results."""
    while part.kind == "bitcast":
        part = inside[part.operands[0]]
    if part.kind in ("dynamic-update-slice", "scatter"):
        return _update(inside, part)
    return _written(program, inside, part) if part.kind == "fusion" else part.num_bytes


def xla_analysis(compiled: Any, platform: str) -> Mapping[str, float]:
    """Returns XLA's cost analysis of a compiled program, which counts a loop's body once.

    For TPUs it is that of their compiler. For GPUs it is XLA's general one, to which a kernel, or a
    library's product, costs nothing.
    """
    if platform == "tpu":
        return compiled.cost_analysis()
    import jax
    from jax._src.lib import xla_client

    [module] = compiled.runtime_executable().hlo_modules()
    client = jax.devices("cpu")[0].client
    return xla_client._xla.hlo_module_cost_analysis(client, module)
