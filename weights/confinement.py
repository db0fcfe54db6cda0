"""Takes from a process what it does not need: other files, sockets, programs, and whatever changes files or processes.

By two parts of Linux that need no rights. Landlock lets it read some folders, and do nothing else to files. A filter of
system calls (seccomp) refuses those that no worker needs, so it also holds where Landlock is missing, but it cannot
tell one file that is read from another. Neither can be undone, and both hold for threads that follow.
Knows no workers; workers.py calls `confine`. Only 64-bit x86 and ARM have either here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from ctypes import Structure, c_int32, c_long, c_uint8, c_uint16, c_uint32, c_uint64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptserve.weights.system_calls import DENIED, LAST_CALL, Numbers, names, numbers_of

PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
LANDLOCK = (444, 445, 446)  # create_ruleset, add_rule, restrict_self, on all machines
CREATE_RULESET_VERSION = RULE_PATH_BENEATH = 1  # linux/landlock.h
READ_FILE, READ_DIR = 1 << 2, 1 << 3
# The rights to files, from execute to ioctl, that this version of Landlock and the later ones know.
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
NETWORK_ABI, SCOPE_ABI = 4, 6
BIND_AND_CONNECT = SIGNALS_AND_ABSTRACT_SOCKETS = 3

SET_MODE_FILTER, GET_ACTION_AVAIL, FILTER_FLAG_TSYNC = 1, 2, 1  # linux/seccomp.h
RETURN_ALLOW, RETURN_ERROR = 0x7FFF0000, 0x00050000
NUMBER_AT, MACHINE_AT, ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data
LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # linux/bpf_common.h
CLONE_THREAD = 0x00010000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
SIGNAL_OWNERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: a file then sends a signal to any process
TERMINAL_AND_OWNERS = (0x5412, 0x8901, 0x8902)  # TIOCSTI, FIOSETOWN, SIOCSPGRP

# What Python, its libraries and the C library read beside the folders of this Python.
SYSTEM_FILES = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/etc/ld.so.cache"),
    *("/etc/localtime", "/usr/share/locale", "/usr/share/zoneinfo"),
    *("/dev/null", "/dev/urandom", "/proc/self"),
)


@dataclass(frozen=True, slots=True)
class Confinement:
    """What holds a process, or could: the version of Landlock (0: none), and whether calls are filtered."""

    landlock: int
    filters_calls: bool

    def __str__(self) -> str:
        files = f"Landlock (version {self.landlock}) lets them read their own files only"
        calls = "seccomp keeps them from sockets, programs and changes of files"
        return "; ".join(
            (
                files if self.landlock else "there is no Landlock, so they can read what the server's user can",
                calls if self.filters_calls else "there is no seccomp, so they can open sockets",
            )
        )


def available() -> Confinement:
    """Return what this system has."""
    numbers = _numbers()
    if numbers is None:
        return Confinement(0, filters_calls=False)
    action = c_uint32(RETURN_ERROR)
    has_filters = _call(numbers.of["seccomp"], GET_ACTION_AVAIL, 0, ctypes.byref(action)) == 0
    return Confinement(max(0, _call(LANDLOCK[0], None, 0, CREATE_RULESET_VERSION)), has_filters)


def confine(readable: Iterable[str | Path] = ()) -> Confinement:
    """Confine this process for good, to reading these files and folders and Python's own; return what does.

    It can start threads, but no processes. Those started before are filtered, but not held by Landlock.
    """
    numbers, has = _numbers(), available()
    if numbers is None or ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return Confinement(0, filters_calls=False)
    is_held = has.landlock > 0 and _hold([*_own_files(), *_with_targets(map(Path, readable))], has.landlock)
    program = _program(numbers, os.getpid())
    return Confinement(has.landlock if is_held else 0, has.filters_calls and _filter(numbers, program))


def _numbers() -> Numbers | None:
    is_known = sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8
    return numbers_of(platform.machine()) if is_known else None


def _call(number: int, *arguments: Any) -> int:
    """Make a system call; return -1 if it fails, as where the system, or a sandbox around this process, has none."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = c_long
    result: int = call(c_long(number), *(c_long(a) if isinstance(a, int) else a for a in arguments))
    return result


# --- Landlock


class _Ruleset(Structure):
    """struct landlock_ruleset_attr"""

    _fields_ = (("files", c_uint64), ("network", c_uint64), ("scoped", c_uint64))


class _Beneath(Structure):
    """struct landlock_path_beneath_attr"""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", c_uint64), ("descriptor", c_int32))


def _hold(readable: Sequence[Path], abi: int) -> bool:
    """Let this thread read these files and do nothing else to any; return whether that holds."""
    rights = RIGHTS[max(version for version in RIGHTS if version <= abi)]
    network = BIND_AND_CONNECT if abi >= NETWORK_ABI else 0
    attributes = _Ruleset(rights, network, SIGNALS_AND_ABSTRACT_SOCKETS if abi >= SCOPE_ABI else 0)
    size = 8 if abi < NETWORK_ABI else 16 if abi < SCOPE_ABI else 24
    ruleset = _call(LANDLOCK[0], ctypes.byref(attributes), size, 0)
    if ruleset < 0:
        return False
    try:
        for path in readable:
            with suppress(OSError):  # there is no such file here
                _allow(ruleset, path)
        return _call(LANDLOCK[2], ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rights = READ_FILE | READ_DIR if path.is_dir() else READ_FILE
        _call(LANDLOCK[1], ruleset, RULE_PATH_BENEATH, ctypes.byref(_Beneath(rights, descriptor)), 0)
    finally:
        os.close(descriptor)


def _with_targets(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield files and folders, and what links in the folders lead to: the hub's cache keeps files apart from names."""
    for path in paths:
        yield path
        if path.is_dir():
            yield from (entry.resolve() for entry in path.iterdir() if entry.is_symlink() and entry.is_file())


def _own_files() -> Iterator[Path]:
    """Yield what this Python may have to read when it imports a module."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sys.path, *libraries)
    yield from (Path(folder) for folder in dict.fromkeys((*folders, *SYSTEM_FILES)) if folder not in ("", "/"))
    project = __name__.partition(".")[0]  # which may be imported from where it is edited
    own = [module for name, module in sys.modules.items() if name.partition(".")[0] == project]
    yield from (Path(folder) for module in own for folder in getattr(module, "__path__", ()))


# --- seccomp


class _Instruction(Structure):
    """struct sock_filter"""

    _fields_ = (("code", c_uint16), ("if_true", c_uint8), ("if_false", c_uint8), ("value", c_uint32))


class _Program(Structure):
    """struct sock_fprog"""

    _fields_ = (("length", c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


Step = tuple[int, int, int, int]
_ALLOW: Step = (RETURN, 0, 0, RETURN_ALLOW)
_DENY: Step = (RETURN, 0, 0, RETURN_ERROR | errno.EPERM)
_UNKNOWN: Step = (RETURN, 0, 0, RETURN_ERROR | errno.ENOSYS)  # who asks then takes an older call


def _program(numbers: Numbers, pid: int) -> list[Step]:
    """Return the filter: code, steps to skip if true and if false, value."""
    steps: list[Step] = [
        *[(LOAD, 0, 0, MACHINE_AT), (EQUAL, 1, 0, numbers.machine), _DENY],
        *[(LOAD, 0, 0, NUMBER_AT), (ABOVE, 0, 1, LAST_CALL), _UNKNOWN],
    ]

    def add(name: str, *then: Step) -> None:
        if name in numbers.of:
            steps.extend([(EQUAL, 0, len(then), numbers.of[name]), *then])

    for name in names(DENIED):
        add(name, _DENY)
    add("openat2", _UNKNOWN)  # its flags lie in memory, which a filter does not see; so do clone3's
    add("open", *_unless(1, (ANY_BIT, WRITING)))
    add("openat", *_unless(2, (ANY_BIT, WRITING)))
    add("clone3", _UNKNOWN)
    add("clone", *_only(0, (ANY_BIT, CLONE_THREAD)))
    for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        add(name, *_only(0, (EQUAL, pid)))
    add("prlimit64", *_only(0, (EQUAL, 0), (EQUAL, pid)))
    add("fcntl", *_unless(1, *((EQUAL, command) for command in SIGNAL_OWNERS)))
    add("ioctl", *_unless(1, *((EQUAL, command) for command in TERMINAL_AND_OWNERS)))
    return [*steps, _ALLOW]


def _only(argument: int, *tests: tuple[int, int]) -> list[Step]:
    """Allow a call if any of the tests of the lower half of an argument, counted from 0, holds."""
    return [(LOAD, 0, 0, ARGUMENTS_AT + 8 * argument), *_any(tests), _DENY, _ALLOW]


def _unless(argument: int, *tests: tuple[int, int]) -> list[Step]:
    return [(LOAD, 0, 0, ARGUMENTS_AT + 8 * argument), *_any(tests), _ALLOW, _DENY]


def _any(tests: Sequence[tuple[int, int]]) -> list[Step]:
    """Return steps that skip the one behind them if any test holds."""
    return [(code, len(tests) - i, 0, value) for i, (code, value) in enumerate(tests)]


def _filter(numbers: Numbers, steps: Sequence[Step]) -> bool:
    """Filter the calls of all threads of this process; return whether they are."""
    program = _Program(len(steps), (_Instruction * len(steps))(*(_Instruction(*step) for step in steps)))
    return _call(numbers.of["seccomp"], SET_MODE_FILTER, FILTER_FLAG_TSYNC, ctypes.byref(program)) == 0
