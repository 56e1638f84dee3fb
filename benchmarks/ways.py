# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""What an update takes in one, two or four micro-batches, with remat and without: bytes a device.

    uv run --extra tpu-topology --extra gpu-topology python -m benchmarks.ways [--only=TEXT]

Models compiled for chips that are not here, as benchmarks/compile.py does it. Prints a Markdown
table.
"""

import sys

from benchmarks.compile import Case, print_table


def _ways(model: str, topology: str, mesh: str, rows: int, length: int) -> tuple[Case, ...]:
    return tuple(
        Case(
            model=model,
            topology=topology,
            mesh=mesh,
            stage="train",
            rows=rows,
            length=length,
            micro_batches=micro_batches,
            remat=remat,
        )
        for remat in (False, True)
        for micro_batches in (1, 2, 4)
    )


CASES = (
    *_ways("qwen2.5-1.5b", "h100:1x8", "fsdp=8", 4, 1024),
    *_ways("qwen3-0.6b", "h100:1x8", "data=2,fsdp=2,tensor=2", 4, 4096),
    *_ways("qwen2.5-1.5b", "v5p:2x2x2", "fsdp=8", 4, 1024),
    *_ways("qwen2.5-0.5b", "v5p:2x2x1", "fsdp=4", 4, 1024),
    # Twice the length, twice the bytes, without remat too.
    *_ways("qwen3-0.6b", "h100:1x8", "data=2,fsdp=2,tensor=2", 1, 16_384)[:1],
    *_ways("qwen3-0.6b", "h100:1x8", "data=2,fsdp=2,tensor=2", 1, 32_768)[:1],
)


if __name__ == "__main__":
    print_table(CASES, [sys.executable, "-m", "benchmarks.ways"], __doc__)
