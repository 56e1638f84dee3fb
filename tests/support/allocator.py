# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""An allocator limit for virtual CPU devices, which have none of their own.

A CPU device takes what its host has, so that a lack of device memory cannot be seen on it. Inside
`memory_limit` every program and every `jax.device_put` is held against a number of bytes per
device, and fails as on a device that has no more.

Programs are caught at one place, `ExecuteReplicated.__call__` of JAX. Later calls of a jitted
function go past it through a cache in C++, so that this cache is emptied on entry and not filled
inside. Known to hold on jax 0.10.2; where it does not, entering raises `RuntimeError`.
"""

import contextlib
import dataclasses
import functools
import re
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src import dispatch, pjit, stages
from jax._src.interpreters import pxla

_HOST_MEMORIES = ("pinned_host", "unpinned_host")
# Of arrays by their `id`: a reference, and what `_buffers` returns.
_BUFFERS: dict[int, tuple[Any, dict[tuple[Any, int], int]]] = {}
_CPP_CACHES = ("_cpp_pjit_cache_fun_only", "_cpp_pjit_cache_explicit_attributes")


@dataclasses.dataclass
class Allocator:
    """The limit inside one `memory_limit`, and what was asked of it.

    `peak_bytes` is the most that one device needed at once, refused requests included;
    `num_programs` counts programs that were checked, `refused` names what was refused, in order.
    """

    limit: int | None
    takes_donated: bool = False
    peak_bytes: int = 0
    num_programs: int = 0
    refused: list[str] = dataclasses.field(default_factory=list)

    def check(self, name: str, needed: Counter[Any]) -> None:
        """Raises RESOURCE_EXHAUSTED where some device would hold more than the limit."""
        device, num_bytes = max(needed.items(), key=lambda item: item[1], default=(None, 0))
        self.peak_bytes = max(self.peak_bytes, num_bytes)
        if self.limit is not None and num_bytes > self.limit:
            self.refused.append(name)
            raise jax.errors.JaxRuntimeError(
                f"RESOURCE_EXHAUSTED: Out of memory: {name} brings {device} to {num_bytes} bytes, "
                f"and its limit is {self.limit}"
            )


@contextlib.contextmanager
def memory_limit(num_bytes: int | None, *, takes_donated: bool = False) -> Iterator[Allocator]:
    """Limits what every device of this process holds, arrays and running programs together.

    A device holds the live arrays on it, each buffer once, without those in host memory, and while
    a program runs also its results (without those that reuse a donated argument), its temporary
    memory and arguments that have yet to come to the device. Sizes of programs are those of XLA's
    memory analysis. Compiling takes nothing.

    A program for which there is too little memory raises before it runs. Its donated arguments
    stay alive, or with `takes_donated` are deleted, as XLA does on CPUs where a program fails. An
    array that `jax.device_put` placed beyond the limit is freed again.

    Args:
      num_bytes: the limit per device; None only measures (`Allocator.peak_bytes`).
      takes_donated: whether a refused program takes its donated arguments with it.

    Raises:
      RuntimeError: limits are nested, or this version of JAX calls programs or places arrays in
        another way.
    """
    if not _sees_everything():
        raise RuntimeError(
            f"memory_limit does not see every program and device_put of jax {jax.__version__}"
        )
    allocator = Allocator(num_bytes, takes_donated)
    with _hooked(allocator):
        yield allocator


def live_bytes() -> Counter[Any]:
    """Bytes of arrays that each device holds now, each buffer once; host memory not counted."""
    held: dict[tuple[Any, int], int] = {}
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    for array in arrays:
        held.update(_buffers(array))
    for gone in _BUFFERS.keys() - {id(array) for array in arrays}:
        del _BUFFERS[gone]
    total: Counter[Any] = Counter()
    for (device, _), num_bytes in held.items():
        total[device] += num_bytes
    return total


def _buffers(array: jax.Array) -> dict[tuple[Any, int], int]:
    """Bytes of an array's buffers in device memory, by device and address.

    Kept for as long as the array lives: a whole run of tests has thousands that nobody looks at.
    """
    known, buffers = _BUFFERS.get(id(array), (lambda: None, {}))
    if known() is not array:
        buffers = {}
        with contextlib.suppress(RuntimeError):  # the result of a failed program
            if array.sharding.memory_kind not in _HOST_MEMORIES and array.nbytes:
                for shard in array.addressable_shards:
                    address = shard.data.unsafe_buffer_pointer()
                    buffers[shard.device, address] = shard.data.nbytes
        _BUFFERS[id(array)] = weakref.ref(array), buffers
    return buffers


def _checked_after(allocator: Allocator, place: Any) -> Any:
    """`place`, whose arrays are freed again where they are too much."""

    @functools.wraps(place)
    def placed(*args: Any, **settings: Any) -> Any:
        arrays = place(*args, **settings)
        try:
            allocator.check("device_put", live_bytes())
        except jax.errors.JaxRuntimeError:
            del arrays
            raise
        return arrays

    return placed


def _checked_before(allocator: Allocator, execute: Any) -> Any:
    """`execute`, which runs a program only where there is memory for it."""

    @functools.wraps(execute)
    def execute_checked(program: Any, *args: Any) -> Any:
        kept = [arg for k, arg in enumerate(args) if k in program.kept_var_idx]
        allocator.num_programs += 1
        try:
            allocator.check(f"program {program.name}", live_bytes() + _added_bytes(program, kept))
        except jax.errors.JaxRuntimeError:
            if allocator.takes_donated:
                for number in _donated(program.xla_executable):
                    kept[number].delete()
            raise
        return execute(program, *args)

    return execute_checked


def _call_compiled(compiled: Any, *args: Any, **settings: Any) -> Any:
    """A call of a program compiled ahead of time, without its cache in C++."""
    return stages.Compiled.call(compiled._params, *args, **settings)[0]


@contextlib.contextmanager
def _hooked(allocator: Allocator) -> Iterator[None]:
    if stages.Compiled.__call__ is _call_compiled:
        raise RuntimeError("memory_limit inside another memory_limit")
    execute = _checked_before(allocator, pxla.ExecuteReplicated.__call__)
    put = _checked_after(allocator, dispatch._batched_device_put_impl)
    put_shards = _checked_after(allocator, pxla.batched_device_put)
    with (
        mock.patch.object(pxla.ExecuteReplicated, "__call__", execute),
        mock.patch.object(stages.Compiled, "__call__", _call_compiled),
        mock.patch.object(pjit, "_get_fastpath_data", lambda *_, **__: None),
        mock.patch.object(dispatch, "_batched_device_put_impl", put),
        mock.patch.object(pxla, "batched_device_put", put_shards),
    ):
        for name in _CPP_CACHES:
            getattr(pjit, name).clear()
        yield


def _added_bytes(program: Any, args: Sequence[Any]) -> Counter[Any]:
    """Bytes per device that running a program adds to the arrays that are there."""
    stats = program.xla_executable.get_compiled_memory_stats()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    results -= sum(
        _shard_bytes(aval, sharding)
        for aval, sharding in zip(
            program.out_handler.out_avals, program.out_handler.out_shardings, strict=True
        )
        if getattr(sharding, "memory_kind", None) in _HOST_MEMORIES
    )
    present: Counter[Any] = Counter()
    for arg in args:
        array = getattr(arg, "_base_array", arg)  # of random keys what they are made of
        if isinstance(array, jax.Array):
            num_bytes = _shard_bytes(array, array.sharding)
            present.update(dict.fromkeys(array.sharding.addressable_devices, num_bytes))
    return Counter(
        {
            device: max(0, results)
            + stats.temp_size_in_bytes
            + max(0, stats.argument_size_in_bytes - present[device])
            for device in program._local_devices
        }
    )


def _shard_bytes(array: Any, sharding: Any) -> int:
    return jnp.dtype(array.dtype).itemsize * _size(sharding.shard_shape(array.shape))


def _size(shape: Sequence[int]) -> int:
    return functools.reduce(lambda a, b: a * b, shape, 1)


def _donated(executable: Any) -> set[int]:
    """Numbers of the arguments that a program takes, from the first line of its HLO."""
    (module,) = executable.hlo_modules()
    first = module.to_string().partition("\n")[0]
    reused = re.findall(r"\((\d+), \{[\d, ]*\}, (?:may|must)-alias\)", first)
    donors = re.search(r"buffer_donor=\{((?: ?\(\d+, \{[\d, ]*\}\),?)*)", first)
    given = re.findall(r"\((\d+),", donors.group(1)) if donors else []
    return {int(number) for number in (*reused, *given)}


@functools.cache
def _sees_everything() -> bool:
    """Tries functions called before, called again, and compiled ahead, and `jax.device_put`."""
    number = jnp.zeros(())
    before = jax.jit(lambda x: x + 1)
    ahead = before.lower(number).compile()
    for _ in range(3):
        before(number), ahead(number)
    programs = Allocator(None)
    with _hooked(programs):
        for _ in range(3):
            before(number), ahead(number)
    puts = Allocator(None)
    with _hooked(puts):
        jax.device_put(number, jax.devices()[-1])
    return programs.num_programs == 6 and puts.peak_bytes > 0
