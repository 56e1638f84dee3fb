# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""MkDocs hooks: the pages of benchmarks/ are part of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def on_files(files: Files, config: Any) -> Files:
    """Adds benchmarks/*.md and their pictures."""
    for path in sorted([*BENCHMARKS.glob("*.md"), *BENCHMARKS.glob("*.svg")]):
        name = f"benchmarks/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leads links to benchmarks/, which is beside docs/ in the repository, to the site's pages."""
    return re.sub(r"\]\(\.\./((?:\.\./)*benchmarks/)", r"](\1", markdown)
