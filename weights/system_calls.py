"""The system calls of Linux that confinement.py refuses or looks at, and their numbers, from the kernel's asm/unistd.h.

A word is name=number on 64-bit x86/number on 64-bit ARM, which lacks old calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LAST_CALL = 450
"""Later ones are of kernels that did not exist when these lists were made."""

DENIED = """
    socket=41/198 connect=42/203 bind=49/200 listen=50/201 accept=43/202 accept4=288/242 sendto=44/206
    sendmsg=46/211 sendmmsg=307/269
    execve=59/221 execveat=322/281 fork=57/- vfork=58/-
    creat=85/- unlink=87/- unlinkat=263/35 rename=82/- renameat=264/38 renameat2=316/276 link=86/- linkat=265/37
    symlink=88/- symlinkat=266/36 mkdir=83/- mkdirat=258/34 rmdir=84/- mknod=133/- mknodat=259/33 truncate=76/45
    ftruncate=77/46 fallocate=285/47 chmod=90/- fchmod=91/52 fchmodat=268/53 chown=92/- fchown=93/55 lchown=94/-
    fchownat=260/54 setxattr=188/5 lsetxattr=189/6 fsetxattr=190/7 removexattr=197/14 lremovexattr=198/15
    fremovexattr=199/16 utime=132/- utimes=235/- futimesat=261/- utimensat=280/88 name_to_handle_at=303/264
    open_by_handle_at=304/265 fanotify_init=300/262
    mount=165/40 umount2=166/39 pivot_root=155/41 chroot=161/51 open_tree=428/428 move_mount=429/429 fsopen=430/430
    fsconfig=431/431 fsmount=432/432 fspick=433/433 mount_setattr=442/442 setns=308/268 unshare=272/97
    ptrace=101/117 process_vm_readv=310/270 process_vm_writev=311/271 process_madvise=440/440 kcmp=312/272
    tkill=200/130 pidfd_open=434/434 pidfd_getfd=438/438 pidfd_send_signal=424/424 setpriority=141/140
    sched_setaffinity=203/122 sched_setscheduler=144/119 sched_setparam=142/118 sched_setattr=314/274
    ioprio_set=251/30 migrate_pages=256/238 move_pages=279/239
    shmget=29/194 shmat=30/196 shmctl=31/195 semget=64/190 semop=65/193 semctl=66/191 semtimedop=220/192
    msgget=68/186 msgsnd=69/189 msgrcv=70/188 msgctl=71/187 mq_open=240/180 mq_unlink=241/181
    io_uring_setup=425/425 io_uring_enter=426/426 io_uring_register=427/427 io_setup=206/0 io_submit=209/2
    bpf=321/280 perf_event_open=298/241 userfaultfd=323/282 keyctl=250/219 add_key=248/217 request_key=249/218
    acct=163/89 swapon=167/224 swapoff=168/225 reboot=169/142 init_module=175/105 finit_module=313/273
    delete_module=176/106 kexec_load=246/104 kexec_file_load=320/294 sethostname=170/161 setdomainname=171/162
    quotactl=179/60 quotactl_fd=443/443 syslog=103/116 clock_settime=227/112 settimeofday=164/170
    clock_adjtime=305/266 adjtimex=159/171 iopl=172/- ioperm=173/-
"""
"""Sockets; programs and processes; names, sizes and rights of files; mounts and namespaces; other processes; memory and
messages that processes share; other ways to make calls; what only root may."""
LOOKED_AT = """
    open=2/- openat=257/56 openat2=437/437 clone=56/220 clone3=435/435 kill=62/129 tgkill=234/131
    rt_sigqueueinfo=129/138 rt_tgsigqueueinfo=297/240 prlimit64=302/261 fcntl=72/25 ioctl=16/29 seccomp=317/277
"""
"""Their arguments decide; seccomp sets the filter."""

_CALL = re.compile(r"(\w+)=(\d+|-)/(\d+|-)")


@dataclass(frozen=True, slots=True)
class Numbers:
    """Of a machine: AUDIT_ARCH, as filters see it, and the numbers of calls by name."""

    machine: int
    of: dict[str, int]


def names(calls: str) -> list[str]:
    """Return the names of calls."""
    return [name for name, *_ in _CALL.findall(calls)]


def numbers_of(machine: str) -> Numbers | None:
    """Return those of a platform.machine(); None if they are not known."""
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}.get(machine)
    if architecture is None:
        return None
    column = 1 if machine == "x86_64" else 2
    calls = _CALL.findall(DENIED + LOOKED_AT)
    return Numbers(architecture, {call[0]: int(call[column]) for call in calls if call[column] != "-"})
