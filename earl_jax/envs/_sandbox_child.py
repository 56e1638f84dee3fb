# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Process that runs one piece of Python that nobody trusts; `sandbox.run_python` starts it.

It runs as a script and imports nothing of the package, so that it starts within some 30 ms. Its
standard input is a request as JSON, as `sandbox._request` makes it. Its output is the request's
marker in a line, what the code prints, and the marker again if the code ran to its end.
"""

import ast
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
from collections.abc import Iterator
from typing import Any

# System calls that the code may not make, with their numbers on x86-64 and on AArch64: those that
# reach the network, other processes, or anything that outlives this one. Landlock does not cover
# the attributes of files.
_DENIED = """
socket 41 198; execve 59 221; execveat 322 281; fork 57 -; vfork 58 -
kill 62 129; tkill 200 130; tgkill 234 131; rt_sigqueueinfo 129 138; rt_tgsigqueueinfo 297 240
pidfd_send_signal 424 424; pidfd_open 434 434; pidfd_getfd 438 438; ptrace 101 117; kcmp 312 272
process_vm_readv 310 270; process_vm_writev 311 271; process_madvise 440 440
io_uring_setup 425 425; io_uring_enter 426 426; io_uring_register 427 427
bpf 321 280; perf_event_open 298 241; userfaultfd 323 282; add_key 248 217; request_key 249 218
keyctl 250 219; unshare 272 97; setns 308 268; mount 165 40; umount2 166 39; pivot_root 155 41
chroot 161 51; init_module 175 105; finit_module 313 273; delete_module 176 106; reboot 169 142
kexec_load 246 104; swapon 167 224; swapoff 168 225; sethostname 170 161; settimeofday 164 170
clock_settime 227 112; adjtimex 159 171; clock_adjtime 305 266
prlimit64 302 261; setrlimit 160 164; setpriority 141 140; ioprio_set 251 30
sched_setparam 142 118; sched_setscheduler 144 119; sched_setaffinity 203 122
sched_setattr 314 274; migrate_pages 256 238; move_pages 279 239
shmget 29 194; semget 64 190; msgget 68 186; mq_open 240 180; memfd_create 319 279
chmod 90 -; fchmod 91 52; fchmodat 268 53; chown 92 -; lchown 94 -; fchown 93 55; fchownat 260 54
utime 132 -; utimes 235 -; futimesat 261 -; utimensat 280 88; setxattr 188 5; lsetxattr 189 6
fsetxattr 190 7; removexattr 197 14; lremovexattr 198 15; fremovexattr 199 16
fchmodat2 452 452; truncate 76 45
"""
# Of each machine: its column above, its number for a filter, and those of clone and capset.
MACHINES = {"x86_64": (1, 0xC000003E, 56, 126), "aarch64": (2, 0xC00000B7, 220, 91)}
_CLONE3, _CLONE_THREAD = 435, 0x10000
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
# Files have these many rights in a version of Landlock.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Confines the process, then runs the code of the request."""
    request = json.loads(sys.stdin.buffer.read())
    marker = request["marker"]
    with _memory_file(request["stdin"]) as given:
        os.dup2(given, 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    _confine(request["paths"], request["seconds"], request["memory_bytes"])
    print(marker, flush=True)
    random.seed(0)
    if _run(request["parts"], show_last=request["show_last"]):
        print(marker, end="", flush=True)
    # Threads that go on are not waited for.
    os._exit(0)


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


def _confine(paths: list[str], seconds: int, memory_bytes: int) -> None:
    """Takes all rights from this process but those to compute and to read the paths."""
    _call("prctl", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
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
    column, number, clone, capset = MACHINES[platform.machine()]
    # Version 3 of the structure, this process; no capability, also where it runs as root.
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _call("capset", _libc.syscall(capset, header, none))
    _call("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _read_only(paths)
    _filter_calls(column, number, clone)


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


def _filter_calls(column: int, machine: int, clone: int) -> None:
    """Makes the system calls of _DENIED fail, and those that start a process. See seccomp(2)."""
    lines = [line.split() for line in _DENIED.replace("\n", ";").split(";") if line.strip()]
    denied = [int(line[column]) for line in lines if line[column] != "-"]
    # Offsets of a call's number, its machine and its first argument. A jump counts what it passes.
    program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        # Those of another ABI (x32).
        (_AT_LEAST, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _EPERM),
        # The C library falls back on clone.
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ENOSYS),
    ]
    for number in denied:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    program += [
        (_EQUAL, 1, 0, clone),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 16),
        (_HAS_BITS, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _EPERM),
    ]

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


def _call(name: str, result: int) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _run(parts: list[str], *, show_last: bool) -> bool:
    """Runs the parts one after the other as one program. Returns True if it came to its end.

    It did not if it exited, but with status 0 where there is one part. Prints the value of the last
    expression, as the interpreter does, if `show_last`.
    """
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    for number, part in enumerate(parts, 1):
        name = "<code>" if number == 1 else "<tests>"
        linecache.cache[name] = len(part), None, part.splitlines(keepends=True), name
        try:
            _execute(part, name, vars(module), show_last=show_last)
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code)
            well = ended.code in (None, 0) and len(parts) == 1
            return _flushed() and well
        except BaseException as error:  # noqa: BLE001 - the code's own
            inner = error.__traceback__
            while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
                inner = inner.tb_next
            traceback.print_exception(error.with_traceback(inner), file=sys.stdout)
            _flushed()
            return False
    return _flushed()


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


def _flushed() -> bool:
    """Writes out what was printed. Returns False if the code closed the output."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return False
    return True


if __name__ == "__main__":
    main()
