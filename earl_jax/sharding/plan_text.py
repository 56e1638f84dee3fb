# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Plans as text: tables of bytes."""

from collections.abc import Mapping, Sequence

from earl_jax.sharding.ranges import Ranges


def bytes_text(num_bytes: int) -> str:
    """Returns bytes for people: 96 B, 1.50 MiB."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = min((num_bytes.bit_length() - 1) // 10, 4)
    return f"{num_bytes / 1024**power:.2f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def table_lines(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns lines of right-aligned columns, the header first."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]


def device_table_lines(
    sent: Mapping[int, int], received: Mapping[int, int], kept: Mapping[int, int]
) -> list[str]:
    """Returns a table of the bytes that each device sends, receives and keeps."""
    rows = [
        (device, *(bytes_text(column.get(device, 0)) for column in (sent, received, kept)))
        for device in sorted({*sent, *received, *kept})
    ]
    return table_lines(("device", "sends", "receives", "keeps"), rows)


def index_text(index: Ranges) -> str:
    """Returns a box for people: [0:2, 4:8]."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in index) + "]"
