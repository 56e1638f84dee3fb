# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Tables and charts of the benchmark pages, for all scripts of this folder."""

import argparse
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from earl_jax.telemetry.charts import Series, line_chart


def parser_of(doc: str | None, *, writes: bool = True) -> argparse.ArgumentParser:
    """Returns the parser of a benchmark with this docstring; `writes` gives it --write."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if writes:
        parser.add_argument("--write", action="store_true", help="put the tables into the page")
    return parser


def show(text: str, page: Path, *, write: bool, name: str = "table") -> None:
    """Prints tables, and puts them into their page if `write`."""
    print(text)
    if write:
        replace_table(page, text, name)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a Markdown table with a column for each key of the first row."""
    names = list(rows[0]) if rows else []
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def curves_svg(series: Sequence[Series], *, label: str, y_range: tuple[float, float]) -> str:
    """Returns a chart of these as a file of its own, with its colours."""
    chart = str(line_chart(series, label=label, y_range=y_range, width=720))
    colors = ("#2563eb", "#dc2626", "#16a34a", "#d97706", "#7c3aed")
    style = "".join(f".s{i}{{--c:{color}}}" for i, color in enumerate(colors))
    style = (
        f"<style>{style}text{{font:11px sans-serif;fill:#555}}.grid{{stroke:#ddd}}"
        ".tick{stroke:#999}.curve{fill:none;stroke:var(--c);stroke-width:1.6}"
        ".dashed{stroke-dasharray:4 4}circle{fill:var(--c)}.cursor{visibility:hidden}</style>"
    )
    opening, rest = chart.split(">", 1)
    if "xmlns" not in opening:
        opening += ' xmlns="http://www.w3.org/2000/svg"'
    return f"{opening}>{style}{rest}\n"


def with_spread(rows: Sequence[Mapping[str, Any]], first: str) -> list[Mapping[str, Any]]:
    """Returns the rows, and their mean and standard deviation, so named in the column `first`."""
    names = [name for name in rows[0] if name != first]
    found = [
        {first: word, **{name: summed([row[name] for row in rows]) for name in names}}
        for word, summed in (("mean", statistics.fmean), ("deviation", statistics.stdev))
    ]
    return [*rows, *found]


def machine() -> str:
    """Returns the processor, the versions, the day and the commit, for the page."""
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True)
    return (
        f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"jax {importlib.metadata.version('jax')}, {time.strftime('%Y-%m-%d')}, "
        f"commit {commit.stdout.strip() or 'unknown'}."
    )


def replace_table(page: Path, text: str, name: str = "table") -> None:
    """Replaces the table of this name in a page, between its two marks.

    Raises ValueError without these.
    """
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, begin, behind = page.read_text().partition(first)
    _, end, after = behind.partition(last)
    if not (begin and end):
        raise ValueError(f"{page} has no lines {first!r} and {last!r} to put a table between")
    page.write_text(f"{before}{first}\n{text.strip()}\n\n{machine()}\n{last}{after}")


def read_table(page: Path, name: str = "table") -> list[dict[str, str]]:
    """Returns the rows of the table of this name in a page; numbers have no thousands' commas."""
    text = page.read_text().partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name}")[0]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    names, _, *rows = [[cell.strip() for cell in line] for line in lines]
    comma = re.compile(r"(?<=\d),(?=\d{3})")
    return [dict(zip(names, (comma.sub("", c) for c in row), strict=True)) for row in rows]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
