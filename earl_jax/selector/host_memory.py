# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What lies in the memory of a host beside its devices, and whether there is room for it. Pure.

Two things may: what each device leaves there (the optimizer's moments during a rollout, the caches
of rows that wait), and pages that are parked (config.rollout.parking_host_gib, of a whole host).
Not counted are the operating system and the processes themselves. A spare of the trainer's state is
there only while an update runs for the first time, when its moments are on the devices.

By the figures of `hardware.py` a chip has less memory than its share of its host's, so that
moments, which were on the chips, always find room beside few parked pages. Caches that wait may be
many times what a chip holds.
"""

from earl_jax.selector.choose import size_words
from earl_jax.selector.hardware import Hardware


def waiting_bytes(rows: int, rows_at_once: int, row_bytes: int) -> int:
    """Bytes per device of the caches of those rows that do not run, were all of them kept.

    Of 16 rows of 10 bytes, of which 14 run at once, 2 wait: 20 bytes.
    """
    return max(0, rows - rows_at_once) * row_bytes


def host_bytes(hardware: Hardware, bytes_a_device: int, parked_bytes: int = 0) -> int:
    """Bytes of a host's memory, of whose devices each leaves so many there."""
    return min(hardware.devices_a_host, hardware.num_devices) * bytes_a_device + parked_bytes


def host_obstacle(hardware: Hardware, bytes_a_device: int, parked_bytes: int = 0) -> str:
    """Why a host cannot hold so much, as the end of a sentence; "" where it can."""
    need, has = host_bytes(hardware, bytes_a_device, parked_bytes), hardware.host_memory_bytes
    if need <= has:
        return ""
    return f"needs {size_words(need)} of its hosts' memory, of which each has {size_words(has)}"
