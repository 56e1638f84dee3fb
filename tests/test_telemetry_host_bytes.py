# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""The host byte metric is a measurement, or it is absent."""

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from earl_jax.settings.errors import RunError
from earl_jax.sharding.reshard import reshard
from earl_jax.telemetry import host_bytes
from earl_jax.telemetry.host_bytes import HostByteCounter, available, only_on_devices

P = PartitionSpec


def make_sharded() -> jax.Array:
    """32 float32 over all devices, never read before: 128 bytes."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return jax.device_put(np.arange(32, dtype=np.float32), NamedSharding(mesh, P("x")))


def make_single() -> jax.Array:
    """32 float32 on one device: 128 bytes."""
    return jax.device_put(np.arange(32, dtype=np.float32), jax.devices()[1])


@pytest.mark.parametrize(
    ("read", "make", "num_bytes"),
    [
        (jax.device_get, make_sharded, 128),
        (jax.device_get, make_single, 128),
        (np.asarray, make_sharded, 128),
        (np.array, make_sharded, 128),
        (lambda x: np.asarray(x.astype(jnp.bfloat16)), make_single, 64),
        (lambda x: x.tolist(), make_sharded, 128),
        (lambda x: x.tolist(), make_single, 128),
        (lambda x: float(x[3]), make_single, 4),
        (lambda x: int(x[3]), make_sharded, 4),
        (lambda x: x.sum().item(), make_sharded, 4),
        (
            lambda x: [np.asarray(s.data.astype(jnp.bfloat16)) for s in x.addressable_shards],
            make_sharded,
            64,
        ),
        (lambda x: x + 1, make_sharded, 0),
        (lambda x: x.block_until_ready(), make_single, 0),
    ],
)
def test_every_read_is_counted_in_bytes(read, make, num_bytes):
    array = make()
    with HostByteCounter() as counter:
        read(array)
    assert counter.num_bytes == num_bytes


def test_device_put_between_meshes_is_caught_and_reshard_is_zero():
    source = make_sharded()
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    target = NamedSharding(mesh, P("y"))
    with HostByteCounter() as counter:
        reshard(source, target)
    assert counter.num_bytes == 0
    with HostByteCounter() as counter:
        jax.device_put(source, target)
    assert counter.num_bytes == 128


def test_a_run_ends_whose_stage_reads():
    # jax 0.10.2 lets the read pass, and the counter sees it; 0.12's transfer guard refuses it.
    words = "128 bytes of experience or weights came through the host|Disallowed device-to-host"
    with pytest.raises((RunError, jax.errors.JaxRuntimeError), match=words), only_on_devices():
        make_sharded().tolist()


def test_a_value_kept_on_the_host_counts_once():
    array = make_sharded()
    with HostByteCounter() as counter:
        jax.device_get(array)
        np.asarray(array)
    assert counter.num_bytes == 128


def test_threads_count_for_themselves():
    num_threads, num_reads = 4, 50
    counts = []

    def work() -> None:
        with HostByteCounter() as own:
            for _ in range(num_reads):
                make_single().tolist()
        counts.append(own.num_bytes)

    with HostByteCounter() as here:
        threads = [threading.Thread(target=work) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts == [num_reads * 128] * num_threads
    assert here.num_bytes == 0


@pytest.mark.parametrize(
    ("constant", "name"),
    [("_DOOR", "_no_such_attribute"), ("_DOOR", "tolist"), ("_DOOR", "sharding")],
)
def test_an_unknown_jax_gives_no_number_and_one_warning(monkeypatch, caplog, constant, name):
    array_class = type(jnp.zeros(()))
    before = dict(vars(array_class))
    monkeypatch.setattr(host_bytes, "_works", None)
    monkeypatch.setattr(host_bytes, constant, name)
    with caplog.at_level(logging.WARNING), HostByteCounter() as counter:
        make_sharded().tolist()
    assert not available()
    assert counter.num_bytes is None
    assert len([record for record in caplog.records if record.name == host_bytes.__name__]) == 1
    assert dict(vars(array_class)) == before
