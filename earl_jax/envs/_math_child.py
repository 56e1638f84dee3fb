# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Process that compares answers by math-verify; `math_answer.correct` starts it.

Each line of its input is a JSON array of the right answer and a reply; it answers each with a line,
the fields of `math_answer.Compared`. It is a process of its own because math-verify ends what takes
long by a signal, which only a main thread gets, and because sympy keeps the interpreter to itself.
"""

import json
import resource
import sys

# For reading a text, and for comparing two.
SECONDS = 2
_MEMORY_BYTES = 2**31


def main() -> None:
    """Answers until the input ends."""
    from math_verify import parse, verify

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    limits = {"parsing_timeout": SECONDS, "raise_on_error": False}
    for line in sys.stdin:
        gold, reply = json.loads(line)
        right = parse(f"${gold}$", **limits) or parse(gold, **limits)
        found = parse(reply, **limits)
        equal = verify(right, found, timeout_seconds=SECONDS, raise_on_error=False)
        print(json.dumps([bool(right), bool(found), bool(equal)]), flush=True)


if __name__ == "__main__":
    main()
