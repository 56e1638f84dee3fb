# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""A policy's Python: what it may do, what it may not, and what an episode is paid for it."""

import asyncio
import json
import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from earl_jax.config.file import load_config_file, make_config
from earl_jax.envs.code import Python, passes, program_of
from earl_jax.envs.environment import check_start, check_step
from earl_jax.envs.event_loop import settle
from earl_jax.envs.processes import sandbox
from earl_jax.envs.processes.sandbox import Limits, run_python
from earl_jax.envs.registry import open_environment
from earl_jax.envs.single_turn import SingleTurn
from earl_jax.envs.tools.tool_use import ToolUse
from earl_jax.settings.errors import InputError
from tests.support import ROOT

try:
    sandbox.check_sandbox()
    OBSTACLE = ""
except InputError as error:
    OBSTACLE = str(error)
pytestmark = pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)

ADD = "def add(a, b):\n    return a + b\n"
DENIED = "PermissionError: "
ERRS = "import sys\nprint(9, file=sys.stderr)\n"


def run(code: str, **arguments) -> sandbox.Ran:
    return asyncio.run(run_python(code, **arguments))


def children(parent: int | str = "self") -> set[int]:
    """The programs that a process runs."""
    lists = Path(f"/proc/{parent}/task").glob("*/children")
    found = {int(pid) for each in lists for pid in each.read_text().split()}
    return {pid for pid in found if "_sandbox_child" in read(Path(f"/proc/{pid}/cmdline"))}


def read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_gone(pid: int) -> bool:
    stat = read(Path(f"/proc/{pid}/stat"))
    return not stat or " Z " in stat


def eventually(holds, within_s: float = 20.0) -> bool:
    until_s = time.monotonic() + within_s
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.02)
    return holds()


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print('a')\n1 + 1", "a\n2\n"),
        ("x = 3", ""),
        ("None", ""),
        ("", ""),
        ("import numpy as np\nint(np.arange(4).sum())", "6\n"),
        (
            "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nA()",
            "A(x=1)\n",
        ),
        ("import asyncio\nasync def f():\n    return 3\nasyncio.run(f())", "3\n"),
        ("import threading as t\nx = t.Thread(target=print, args='a')\nx.start()\nx.join()", "a\n"),
        ("print(input(), input())", "é 2\n"),
        ("import sys\nsys.stdin.buffer.read()", r"b'\xc3\xa9\n2\n'" + "\n"),
        ("import sys\nsys.exit()", ""),
        ("exit(0)", ""),
        (
            "import threading as t, time\nf = lambda: (time.sleep(0.1), print(1))\n"
            "t.Thread(target=f).start()",
            "1\n",
        ),
        ("import atexit\natexit.register(print, 'end')\nprint('a')", "a\nend\n"),
        ("import io, sys\nsys.stdout = io.StringIO()\nprint('lost')", ""),
        ("f = open(1, 'w', closefd=False)\nf.write('late')\nNone", "late"),
        ("import resource as r\nr.setrlimit(r.RLIMIT_STACK, r.getrlimit(r.RLIMIT_STACK))", ""),
        ("import socket\na, b = socket.socketpair()\na.send(b'x')\nb.recv(1)", "b'x'\n"),
        ("import os\nos.write(1, os.read(0, 2)) and None", "é"),
        ("print('é', end='')", "é"),
    ],
)
def test_a_program_computes_prints_and_reads_its_input(code, output):
    assert run(code, show_last=True, stdin="é\n2\n") == (output, True, "")


def test_a_program_begins_alike_each_time():
    code = "import random\nprint(hash('a'), random.random(), list({'a', 'b', 'c', 'd'}))"
    first, second = run(code), run(code)
    assert first == second and first.completed


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("def f():\n    1 / 0\nf()", "ZeroDivisionError: division by zero\n"),
        ("print(", "SyntaxError: '(' was never closed\n"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt\n"),
        ("x = bytearray(10**10)", "MemoryError\n"),
        ("def f(n):\n    f(n)\nf(0)", "RecursionError: maximum recursion depth exceeded\n"),
    ],
)
def test_a_program_that_fails_shows_why_in_its_own_lines(code, ends):
    output, completed, ended = run(code)
    assert output.endswith(ends) and (completed, ended) == (False, "")
    assert "sandbox" not in output and "Traceback" not in output[1:]


def test_the_lines_of_a_traceback_are_the_programs():
    assert run("def f():\n    1 / 0\n\nf()").output.splitlines()[:4] == [
        "Traceback (most recent call last):",
        '  File "<code>", line 4, in <module>',
        "    f()",
        '  File "<code>", line 2, in f',
    ]


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("while True: pass", "used the processor for more than 1 s"),
        ("import time; time.sleep(60)", "took longer than 4 s"),
        ("while True: print('a' * 1000)", "printed more than 2000 bytes"),
        ("import ctypes; ctypes.string_at(0)", "was ended by SIGSEGV"),
        ("import os; os._exit(3)", "ended with status 3"),
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("import sys; print(1); sys.exit('bad')", "ended with status 1"),
        (
            "import signal as s\ns.signal(s.SIGXCPU, s.SIG_IGN)\nwhile True: pass",
            "was ended by SIGKILL",
        ),
    ],
)
def test_a_program_is_ended_at_its_limits(code, ended, monkeypatch):
    if "sleep" not in code:
        # On a busy machine.
        monkeypatch.setattr(sandbox, "_PATIENCE", 30)
    ran = run(code, limits=Limits(seconds=1, output_bytes=2000))
    assert (ran.completed, ran.ended) == (False, ended) and len(ran.output) <= 2100
    assert children() == set()


LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
RAW_FORK = {"x86_64": "libc.syscall(57)", "aarch64": "libc.syscall(220, 17, 0, 0, 0, 0)"}


@pytest.mark.parametrize(
    "attack",
    [
        "open('{secret}')",
        "open('{secret}', 'a')",
        "open('{folder}/new', 'w')",
        "import os; os.listdir('{folder}')",
        "import os; os.mkdir('{folder}/new')",
        "import os; os.remove('{secret}')",
        "import os; os.rename('{secret}', '{folder}/new')",
        "import os; os.symlink('{secret}', '{folder}/new')",
        "import os; os.truncate('{secret}', 0)",
        "import os; os.chmod('{secret}', 0o777)",
        "import os; os.chown('{secret}', 1, 1)",
        "import os; os.utime('{secret}')",
        "import os; os.setxattr('{secret}', 'user.a', b'1')",
        "open('/proc/{pid}/environ')",
        "open('/proc/self/mem')",
        "import os; os.kill({pid}, 9)",
        "import os; os.pidfd_open({pid})",
        "import os; os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
        "import os; os.sched_setaffinity({pid}, {{0}})",
        "import resource; resource.prlimit({pid}, resource.RLIMIT_NOFILE, (3, 3))",
        "import os; os.fork()",
        "import os; os.execv('/bin/sh', ['sh'])",
        "import subprocess; subprocess.run('true')",
        "import os; os.posix_spawn('/bin/true', ['true'], {{}})",
        "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.create_connection(('127.0.0.1', 22))",
        "import urllib.request as r; r.urlopen('http://127.0.0.1')",
        "import os; os.memfd_create('x')",
        "import os; os.mkfifo('{folder}/new')",
        LIBC + "if {fork} < 0: raise OSError(ctypes.get_errno(), 'fork')",
        LIBC + "if libc.ptrace(16, {pid}, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'ptrace')",
        LIBC + "if libc.unshare(0x10000000) < 0: raise OSError(ctypes.get_errno(), 'unshare')",
        LIBC + "if libc.shmget(0, 4096, 0o1600) < 0: raise OSError(ctypes.get_errno(), 'shmget')",
        LIBC + "if libc.shmctl(0, 13, 0) < 0: raise OSError(ctypes.get_errno(), 'shmctl')",
        LIBC + "if libc.prctl(1, 0, 0, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'prctl')",
        LIBC + "if libc.inotify_init1(0) < 0: raise OSError(ctypes.get_errno(), 'inotify')",
        LIBC + "if libc.timer_create(0, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'timer')",
        "import socket as s; s.socketpair(s.AF_UNIX, s.SOCK_DGRAM)",
        "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, {pid})",
        "import fcntl; fcntl.fcntl(0, fcntl.F_SETSIG, 9)",
        "import fcntl; fcntl.ioctl(0, 0x40086602, 0)",
        "import os; os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
        "import os; os.open('/proc/self/fd/1', os.O_RDONLY)",
    ],
)
def test_a_program_reaches_nothing_outside(attack, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("answer")
    stood = secret.stat()
    fork = RAW_FORK[platform.machine()]
    code = attack.format(secret=secret, folder=tmp_path, pid=os.getpid(), fork=fork)
    output, completed, ended = run(code + "\nprint('done')")
    # urllib wraps what it raises.
    assert DENIED in output or "Operation not permitted" in output, output
    assert (completed, ended) == (False, "")
    assert [secret] == list(tmp_path.iterdir()) and secret.read_text() == "answer"
    after = secret.stat()
    assert (after.st_mode, after.st_uid, after.st_mtime_ns) == (
        *(stood.st_mode, stood.st_uid),
        stood.st_mtime_ns,
    )


def test_threads_are_bounded_and_share_their_descriptors():
    """So that a program takes neither the machine's processes nor its sockets' memory."""
    code = """
        import os, threading, time
        count = 0
        try:
            for count in range(1000):
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        except RuntimeError:
            pass
        print(count)
    """
    ran = run(textwrap.dedent(code))
    # Of another user than root only where the system lets it make a namespace.
    assert ran.completed and (os.getuid() or int(ran.output) < 70)
    raw = LIBC + "libc.syscall({number}, {arguments}) < 0 and print(ctypes.get_errno())"
    clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    # CLONE_THREAD, CLONE_SIGHAND and CLONE_VM without CLONE_FILES; CLOSE_RANGE_UNSHARE.
    for number, arguments in ((clone, "0x10900, 0, 0, 0, 0"), (436, "60, 63, 2")):
        assert run(raw.format(number=number, arguments=arguments)).output == "1\n"


def test_calls_newer_than_the_list_are_not_there():
    code = LIBC + "print(libc.syscall(463), ctypes.get_errno() == 38)"
    assert run(code) == ("-1 True\n", True, "")


def test_a_program_that_a_signal_without_a_name_ends_is_no_outage():
    assert sandbox._ending(-40, 1) == "was ended by signal 40"


def test_a_program_inherits_no_variables_and_no_files(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    code = f"import os\nprint('API_KEY' in os.environ)\nos.fstat({writer})"
    output, completed, _ = run(code)
    os.close(reader)
    os.close(writer)
    assert output.startswith("False\n") and "Bad file descriptor" in output and not completed


def test_a_program_that_is_no_longer_waited_for_is_ended():
    async def give_up():
        await asyncio.wait_for(run_python("import time; time.sleep(60)"), 0.5)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert children() == set()


def test_a_program_ends_with_the_process_that_runs_it(tmp_path):
    code = (
        "import asyncio\nfrom earl_jax.envs.processes.sandbox import Limits, run_python\n"
        "asyncio.run(run_python('import time; time.sleep(600)', limits=Limits(seconds=200)))"
    )
    runner = subprocess.Popen([sys.executable, "-c", code])
    assert eventually(lambda: bool(children(runner.pid)))
    (pid,) = children(runner.pid)
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    assert eventually(lambda: is_gone(pid))


def test_as_many_programs_run_at_a_time_as_there_are_processors():
    most = 0

    async def watch(running):
        nonlocal most
        while not running.done():
            most = max(most, len(children()))
            await asyncio.sleep(0.005)

    async def all_of_them():
        running = asyncio.gather(*(run_python(f"print({n})") for n in range(20)))
        await asyncio.gather(watch(running), running)
        return running.result()

    ran = asyncio.run(all_of_them())
    assert [each.output for each in ran] == [f"{n}\n" for n in range(20)]
    assert 1 <= most <= len(os.sched_getaffinity(0))


def test_program_is_not_run_where_the_sandbox_is_unavailable(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    sandbox.check_sandbox.cache_clear()
    try:
        with pytest.raises(InputError, match=r"cannot be confined here .* on riscv64"):
            run("print(1)")
        with pytest.raises(InputError, match="needs Linux 5.13 or newer with Landlock"):
            Python()
    finally:
        monkeypatch.undo()
        sandbox.check_sandbox.cache_clear()


def test_a_process_that_does_not_start_is_an_outage(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(ConnectionError, match="no process for a policy's code"):
        run("print(1)")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho it is broken\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(ConnectionError, match="ended with status 1: it is broken"):
        run("print(1)")


def test_the_tool_answers_with_what_a_program_prints():
    row = {"prompt": "What is 6 x 7?"}
    env = ToolUse(tools=["earl_jax.envs.code:Python"], row=row, reward=lambda reply, **row: 1.0)
    (tool,) = check_start(env.start()).tools
    assert tool["function"]["name"] == "python"
    assert tool["function"]["parameters"]["required"] == ["code"]
    codes = ["6 * 7", "x = 1", "1 / 0", "print('a')\\nimport os\\nos._exit(3)"]
    calls = "".join(
        f'<tool_call>{{"name": "python", "arguments": {{"code": "{code}"}}}}</tool_call>'
        for code in codes
    )
    texts = [message.text for message in check_step(settle(env.step(calls))).messages]
    assert texts[:2] == ["42\n", "[the program printed nothing]"]
    assert texts[2].endswith("ZeroDivisionError: division by zero\n")
    assert texts[3] == "[the program ended with status 3]"
    wrong = '<tool_call>{"name": "python", "arguments": {"code": 5}}</tool_call>'
    (answer,) = check_step(settle(env.step(wrong))).messages
    assert answer.text == "error: TypeError: code must be a text"


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```py\nx = 1\n```\nBetter:\n```python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nIt prints:\n```\n3\n```", "x = 1\n"),
        ("```\nx = 1\n```\n```\nx = 2\n```", "x = 2\n"),
        ("1. So:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ('````python title="a"\nx = "```"\n````', 'x = "```"\n'),
        ("```python3.11 {.line}\nx = 1\n```", "x = 1\n"),
        ("```python3 \nx = '```'\n```", "x = '```'\n"),
        ("```python\nx = 1", "x = 1"),
        ("```json\n{}\n```\n```python\nx = 1\n```", "x = 1\n"),
    ],
)
def test_the_program_of_a_reply_is_its_last_block_of_python(reply, code):
    assert program_of(reply) == code


CALLS = {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"]}
PAIRS = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[1, 2]]}
ANY = "class Any(int):\n    def __eq__(self, other):\n        return True\n"


@pytest.mark.parametrize(
    ("reply", "row", "reward", "passed"),
    [
        (f"```python\n{ADD}```", {"tests": "assert add(1, 2) == 3"}, 1, 1),
        (ADD, {"tests": "assert add(1, 2) == 4"}, 0, 0),
        # None of these reaches the end of the tests.
        (ADD + "import sys\nsys.exit()", {"tests": "assert add(1, 2) == 4"}, 0, 0),
        (ADD + "import os\nos._exit(0)", {"tests": "assert add(1, 2) == 4"}, 0, 0),
        (ADD + "import sys\nsys.stdout.close()", {"tests": "assert add(1, 2) == 4"}, 0, 0),
        ("def add(a, b):\n    raise SystemExit", {"tests": "assert add(1, 2) == 4\n1"}, 0, 0),
        ("print(2 * int(input()))", {"inputs": ["1", "2"], "outputs": ["2", "4 \n\n"]}, 1, 1),
        ("print(2)", {"inputs": ["1", "2", "1"], "outputs": ["2", "4", "2"]}, 0, 1 / 3),
        ("print(2)\nexit(0)", {"inputs": ["1"], "outputs": ["2"]}, 1, 1),
        (f"{ERRS}print(2)", {"inputs": [""], "outputs": ["2"]}, 1, 1),
        ("print(2)\nexit(1)", {"inputs": ["1"], "outputs": ["2"]}, 0, 0),
        ("print(2)", {"tests": "assert True", "inputs": ["1"], "outputs": ["3"]}, 0, 0.5),
        (f"print('[5]')\n{ADD}print(7)", CALLS, 1, 1),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", CALLS, 1, 1),
        ("def add(a, b):\n    return (a, b)", PAIRS, 1, 1),
        (ADD, CALLS | {"outputs": [3, "ba"]}, 0, 0.5),
        (ADD, CALLS | {"outputs": [[3], ["ab"]]}, 1, 1),
        (ADD, CALLS | {"inputs": ["1\n2", '"a"\n"b"'], "outputs": ["3", '"ab"']}, 1, 1),
        (f"import atexit\natexit.register(lambda: print('[' * 200000))\n{ADD}", CALLS, 0, 0),
        # What is wanted is nowhere in the program's process, and what equals all is no JSON.
        (f"{ANY}def add(a, b):\n    return Any()", CALLS, 0, 0),
        ("def sub(a, b):\n    return a - b", CALLS, 0, 0),
        ("print(3)\nimport os\nos._exit(0)", CALLS, 0, 0),
        ("def add(a, b):\n    return {1, 2}", CALLS, 0, 0),
        (f"{ADD}print('x'", CALLS, 0, 0),
    ],
)
def test_a_program_is_paid_if_it_passes_all_tests(reply, row, reward, passed):
    env = SingleTurn(row={"prompt": "write", **row}, reward=passes)
    end = check_step(settle(env.step(reply)))
    assert (end.reward, end.done) == (reward, True)
    assert end.metrics == {"passed": pytest.approx(passed)}


def test_a_row_without_tests_is_an_error():
    with pytest.raises(InputError, match="neither 'tests' nor 'inputs'"):
        asyncio.run(passes("x"))
    with pytest.raises(InputError, match="has 1 inputs and 0 outputs"):
        asyncio.run(passes("x", inputs=["1"]))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tests": ["assert True"]}, "'tests' of a row of config.tasks is .*; it must be a text"),
        ({"inputs": [1], "outputs": ["1"]}, "'inputs' of a row .* is .1.; it must be a list of"),
        ({"inputs": ["1"], "outputs": [2]}, "'outputs' of a row .* must be a list of texts"),
        ({"inputs": "12", "outputs": "24"}, "'inputs' of a row .* must be a list of texts"),
        ({"fn_name": 1, "inputs": ["1"], "outputs": ["1"]}, "'fn_name' .* a function's name"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "'inputs' .* list of lists of argum"),
        ({"fn_name": "f", "inputs": ["a"], "outputs": ["1"]}, "is 'a', .* they must be JSON"),
        ({"fn_name": "f", "inputs": ["1"], "outputs": ["1\n2"]}, "is '1', .* they must be JSON"),
    ],
)
def test_a_row_of_other_types_is_an_error_that_names_the_field(row, words):
    with pytest.raises(InputError, match=words):
        asyncio.run(passes("x", **row))


def test_the_how_to_works_as_it_says(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "howto" / "code.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        (tmp_path / code.split("\n")[0].removeprefix("# ")).write_text(code)
    (rows,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "programs.jsonl").write_text(rows)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = make_config(load_config_file(tmp_path / "code_config.py"))
    played = open_environment(config.env, config.tasks, seed=0, num_tasks=3)
    tasks = [json.loads(row) for row in rows.splitlines()]
    assert config.tasks.reward == "earl_jax.envs.code:passes"
    assert isinstance(played.make(**played.first_args), SingleTurn)
    programs = [f"```python\n{ADD}```", "```python\nprint(2 * int(input()))\n```", ADD]
    paid = [
        asyncio.run(passes(program, **task)) for program, task in zip(programs, tasks, strict=True)
    ]
    assert paid == [{"reward": 1.0, "passed": 1.0}] * 3
    env = ToolUse(tools=["calculator:calculate"], row=tasks[0], reward=passes)
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "2**10"}}</tool_call>'
    (answer,) = check_step(settle(env.step(call))).messages
    assert answer.text == "1024\n"
