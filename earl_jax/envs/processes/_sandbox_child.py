# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Process that runs one piece of Python that nobody trusts; `sandbox.run_python` starts it.

It runs as a script and imports nothing of the package, so that it starts within some 30 ms. Its
standard input is a request as JSON, as `sandbox.run_python` makes it. Its output is the request's
marker in a line, what the code prints, and the marker again if the code ran to its end.
"""

import ast
import atexit
import contextlib
import ctypes
import json
import linecache
import os
import platform
import random
import resource
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

# The system calls that the code may make, with their numbers on x86-64 and on AArch64. They reach
# the process itself, the files that Landlock lets it open, and nothing that outlives it.
_ALLOWED = """
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; preadv 295 69; close 3 57
stat 4 -; lstat 6 -; fstat 5 80; newfstatat 262 79; statx 332 291
statfs 137 43; fstatfs 138 44; lseek 8 62; getdents64 217 61; getcwd 79 17; access 21 -
faccessat 269 48; faccessat2 439 439; readlink 89 -; readlinkat 267 78; fadvise64 221 223
mmap 9 222; mprotect 10 226; munmap 11 215; mremap 25 216; brk 12 214; madvise 28 233
msync 26 227; mincore 27 232; membarrier 324 283; rt_sigaction 13 134; rt_sigprocmask 14 135
rt_sigreturn 15 139; rt_sigpending 127 136; rt_sigtimedwait 128 137; rt_sigsuspend 130 133
sigaltstack 131 132; restart_syscall 219 128; pause 34 -; alarm 37 -; getitimer 36 102
setitimer 38 103; nanosleep 35 101; clock_nanosleep 230 115; clock_gettime 228 113
clock_getres 229 114; gettimeofday 96 169; time 201 -; times 100 153; pipe 22 -; pipe2 293 59
dup 32 23; dup2 33 -; dup3 292 24; select 23 -; pselect6 270 72; poll 7 -; ppoll 271 73
epoll_create 213 -; epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -; epoll_pwait 281 22
epoll_pwait2 441 441; eventfd2 290 19; sendto 44 206; recvfrom 45 207; sendmsg 46 211
recvmsg 47 212; shutdown 48 210; getsockname 51 204; getpeername 52 205; getsockopt 55 209
getpid 39 172; getppid 110 173; gettid 186 178; getuid 102 174; geteuid 107 175; getgid 104 176
getegid 108 177; getresuid 118 148; getresgid 120 150; getgroups 115 158; getpgrp 111 -
getpgid 121 155; getsid 124 156; umask 95 166; uname 63 160; sysinfo 99 179; getrusage 98 165
getrlimit 97 163; getcpu 309 168; getrandom 318 278; capget 125 90; futex 202 98
set_tid_address 218 96; set_robust_list 273 99; get_robust_list 274 100; rseq 334 293
arch_prctl 158 -; sched_yield 24 124; sched_getaffinity 204 123; sched_getscheduler 145 120
sched_getparam 143 121; sched_get_priority_max 146 125; sched_get_priority_min 147 126
getpriority 140 141; wait4 61 260; waitid 247 95; exit 60 93; exit_group 231 94
"""
# Those that it may make with some arguments: the number of one, and then the values that are
# allowed (=), bits that it must not have (&), or bits of which it must have one (|). Files are not
# emptied; a process sets its own limits, and names its threads, which are the only processes that
# it starts, and share its descriptors; a pair of sockets is a stream; of descriptors it asks and
# sets what is its own.
_WITH_ARGUMENTS = """
open 2 - 1 & 0x200; openat 257 56 2 & 0x200; clone 56 220 0 | 0x10000; clone 56 220 0 | 0x400
prlimit64 302 261 0 = 0; close_range 436 436 2 & 2
prctl 157 167 0 = 15 16 0x53564d41; socketpair 53 199 0 = 1; socketpair 53 199 1 & 6
fcntl 72 25 1 = 0 1 2 3 4 1030 1032; ioctl 16 29 1 = 0x5401 0x5413 0x541B 0x5421 0x5450 0x5451
"""
# Of each machine: its column above, its number for a filter, and that of capset.
MACHINES = {"x86_64": (1, 0xC000003E, 126), "aarch64": (2, 0xC00000B7, 91)}
# The C library tries these and takes older ones where they are not there: clone3, and what is newer
# than the list.
_CLONE3, _NEWER = 435, 453
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CLONE_NEWUSER, _OWN_USERS, _THREADS = 0x10000000, 0x40000000, 64
CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
# Files have these many rights in a version of Landlock.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Confines the process, runs the code of the request, and returns its exit status."""
    _end_with_parent()
    request = json.loads(sys.stdin.buffer.read())
    if os.getppid() != request["parent"]:
        return 1
    with _memory_file(request["stdin"]) as given:
        os.dup2(given, 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    if not request["stderr"]:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # Nobody opens the output to read from it.
    os.fchmod(1, 0)
    confine(request["paths"], request["seconds"], request["memory_bytes"])
    marker = request["marker"].encode()
    os.write(1, marker + b"\n")
    completed = [False]
    # Before the code's own, so that it is called behind them, and behind its threads.
    atexit.register(_end, sys.stdout, lambda: completed[0], marker)
    random.seed(0)
    status, completed[0] = _run(request["parts"], show_last=request["show_last"])
    return status


def _end(output: Any, completed: Callable[[], bool], marker: bytes) -> None:
    for stream in (sys.stdout, output):
        # The code may have replaced or closed it.
        with contextlib.suppress(Exception):
            stream.flush()
    if completed():
        os.write(1, marker)


@contextlib.contextmanager
def _memory_file(text: str) -> Iterator[int]:
    file = os.memfd_create("stdin")
    try:
        with open(file, "wb", closefd=False) as stream:
            stream.write(text.encode("utf-8", "surrogatepass"))
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def _end_with_parent() -> None:
    _call("prctl", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def confine(paths: list[str], seconds: int, memory_bytes: int) -> None:
    """Takes all rights from this process but those to compute and to read the paths."""
    if len(os.listdir("/proc/self/task")) > 1:
        # What follows holds for this thread and those that it starts.
        raise RuntimeError("a package starts a thread together with Python")
    # The process is told of the first limit, and killed at the second.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    limits = {
        "RLIMIT_AS": memory_bytes,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": 64,
    }
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, name), (most, most))
    _limit_threads()
    column, number, capset = MACHINES[platform.machine()]
    # Version 3 of the structure, this process; no capability, also where it runs as root.
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _call("capset", _libc.syscall(capset, header, none))
    _call("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _read_only(paths)
    _filter_calls(column, number)


def _limit_threads() -> None:
    """Bounds the number of threads, where the system lets a process be counted for itself."""
    # In a container it may not. Files are opened by the effective user, who stays.
    with contextlib.suppress(OSError):
        if os.getuid():
            _call("unshare", _libc.unshare(_CLONE_NEWUSER))
        else:
            os.setresuid(_OWN_USERS + os.getpid(), -1, -1)
        resource.setrlimit(resource.RLIMIT_NPROC, (_THREADS, _THREADS))
    _end_with_parent()


def _read_only(paths: list[str]) -> None:
    """Lets this process open files below the paths for reading, and no others. See landlock(7)."""
    version = _libc.syscall(CREATE_RULESET, None, 0, 1)
    _call("landlock", version)
    rights = (1 << _RIGHTS.get(version, 16)) - 1
    # Rights of files, of TCP, and scopes: sockets and signals.
    handled = (ctypes.c_uint64 * 3)(rights, 3, 3)
    known = 1 if version < 4 else 2 if version < 6 else 3
    rules = _libc.syscall(CREATE_RULESET, handled, 8 * known, 0)
    _call("landlock_create_ruleset", rules)
    for path in paths:
        if not os.path.exists(path):
            continue
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = _READ_FILE | (_READ_FOLDER if os.path.isdir(path) else 0)
        rule = ctypes.create_string_buffer(
            allowed.to_bytes(8, sys.byteorder) + file.to_bytes(4, sys.byteorder), 12
        )
        _call("landlock_add_rule", _libc.syscall(_ADD_RULE, rules, 1, rule, 0))
        os.close(file)
    _call("landlock_restrict_self", _libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _filter_calls(column: int, machine: int) -> None:
    """Makes all system calls fail but those of the tables. See seccomp(2)."""
    # Offsets of a call's number and its machine. A jump counts the steps that it passes.
    program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 1, 0, _NEWER),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ENOSYS),
    ]
    for line in _lines(_ALLOWED, column):
        program += [(_EQUAL, 0, 1, int(line[column])), (_RETURN, 0, 0, _ALLOW)]
    tests: dict[int, list[tuple[int, int, int, int]]] = {}
    for line in _lines(_WITH_ARGUMENTS, column):
        tests.setdefault(int(line[column]), []).extend(_argument_test(*line[3:]))
    for number, steps in tests.items():
        program += [(_EQUAL, 0, len(steps) + 1, number), *steps, (_RETURN, 0, 0, _ALLOW)]
    program.append((_RETURN, 0, 0, _EPERM))

    class Step(ctypes.Structure):
        _fields_ = [
            ("code", ctypes.c_uint16),
            ("true", ctypes.c_uint8),
            ("false", ctypes.c_uint8),
            ("value", ctypes.c_uint32),
        ]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint16), ("steps", ctypes.POINTER(Step))]

    steps = (Step * len(program))(*program)
    whole = Program(len(program), ctypes.cast(steps, ctypes.POINTER(Step)))
    _call("seccomp", _libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(whole), 0, 0))


def _lines(table: str, column: int) -> list[list[str]]:
    """Returns the words of a table's entries that have a number in the column."""
    lines = [line.split() for line in table.replace("\n", ";").split(";") if line.strip()]
    return [line for line in lines if line[column] != "-"]


def _argument_test(argument: str, kind: str, *values: str) -> list[tuple[int, int, int, int]]:
    """Returns steps that refuse a call whose argument (its lower half) is not as the table says."""
    load, refuse = (_LOAD, 0, 0, 16 + 8 * int(argument)), (_RETURN, 0, 0, _EPERM)
    numbers = [int(value, 0) for value in values]
    if kind == "&":
        return [load, (_HAS_BITS, 0, 1, numbers[0]), refuse]
    if kind == "|":
        return [load, (_HAS_BITS, 1, 0, numbers[0]), refuse]
    tests = [(_EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    return [load, *tests, refuse]


def _call(name: str, result: int) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _run(parts: list[str], *, show_last: bool) -> tuple[int, bool]:
    """Runs the parts one after the other as one program.

    Prints the value of the last expression, as the interpreter does, if `show_last`. Returns the
    exit status, and True if it came to its end: without an error, and without an exit, but with
    status 0 where there is one part.
    """
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    for number, part in enumerate(parts, 1):
        name = "<code>" if number == 1 else "<tests>"
        linecache.cache[name] = len(part), None, part.splitlines(keepends=True), name
        try:
            _execute(part, name, vars(module), show_last=show_last)
        except SystemExit as ended:
            return _exit_status(ended.code, has_tests=len(parts) > 1)
        except BaseException as error:  # noqa: BLE001 - the code's own
            inner = error.__traceback__
            while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
                inner = inner.tb_next
            # The code may have replaced what this needs.
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                traceback.print_exception(error.with_traceback(inner))
            return 0, False
    return 0, True


def _exit_status(code: object, *, has_tests: bool) -> tuple[int, bool]:
    if code is None or (type(code) is int and code == 0):
        return 0, not has_tests
    if type(code) is int:
        return code & 0xFF, False
    with contextlib.suppress(Exception):
        print(code)
    return 1, False


def _execute(part: str, name: str, names: dict[str, Any], *, show_last: bool) -> None:
    tree: Any = compile(part, name, "exec", ast.PyCF_ONLY_AST)
    last = tree.body[-1] if show_last and tree.body else None
    if isinstance(last, ast.Expr):
        del tree.body[-1]
    exec(compile(tree, name, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), names)
        if value is not None:
            print(repr(value))


if __name__ == "__main__":
    sys.exit(main())
