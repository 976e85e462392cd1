"""The system calls that sandboxed code may not make, as a BPF program.

Namespaces do not isolate everything: AF_VSOCK reaches the host of a virtual machine whatever the network
namespace, and io_uring, bpf or userfaultfd are a wide way into the kernel. Everything else is allowed, so that
any library works.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from functools import cache
from typing import Any

_REFUSED = """
    ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp
    bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register
    keyctl add_key request_key
    mount umount umount2 mount_setattr move_mount open_tree fsopen fsconfig fsmount fspick pivot_root chroot
    unshare setns name_to_handle_at open_by_handle_at fanotify_init quotactl quotactl_fd
    init_module finit_module delete_module kexec_load kexec_file_load
    reboot swapon swapoff acct syslog vhangup uselib nfsservctl lookup_dcookie personality modify_ldt
    settimeofday clock_settime clock_settime64 clock_adjtime clock_adjtime64 adjtimex stime
    sethostname setdomainname iopl ioperm move_pages migrate_pages mbind set_mempolicy
"""

_FAMILIES = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}
_NUM_FAMILIES = 64
"""More than the kernel knows; it refuses higher ones itself."""
_SOCKET_TYPE_MASK = 0xF
_NUM_SOCKET_TYPES = 16
_PROTOCOLS = (33, 132, 136, 262)
"""DCCP, SCTP, UDP-Lite, MPTCP."""
_NEW_NAMESPACES = (
    0x00000080,  # time
    0x00020000,  # mount
    0x02000000,  # cgroup
    0x04000000,  # uts
    0x08000000,  # ipc
    0x10000000,  # user
    0x20000000,  # pid
    0x40000000,  # net
)
_TERMINAL_INJECTION = (0x5412, 0x541C)
"""TIOCSTI, TIOCLINUX."""
_INT = 0xFFFFFFFF


@cache
def system_call_filter() -> bytes:
    """The compiled filter for this machine's architecture; calls of any other (x32, i386) kill the process.

    Raises ImportError without pyseccomp, RuntimeError or OSError without a working libseccomp.
    """
    import pyseccomp

    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for action, call, conditions in _rules(pyseccomp):
        rules.add_rule(action, call, *conditions)
    descriptor = os.memfd_create("system-calls")
    try:
        with open(descriptor, "w+b", closefd=False) as file:
            rules.export_bpf(file)
            file.seek(0)
            return file.read()
    finally:
        os.close(descriptor)


def _rules(pyseccomp: Any) -> Iterator[tuple[int, str, list[Any]]]:
    """Refusals as (action, call, conditions).

    Arguments are compared under a mask: the kernel takes an `int` from the low half of the register, and a plain
    comparison of the whole register lets `socket(0x100000028, ...)` pass as something else than AF_VSOCK.
    """

    def is_int(index: int, value: int, mask: int = _INT) -> Any:
        return pyseccomp.Arg(index, pyseccomp.MASKED_EQ, mask, value)

    refused = pyseccomp.ERRNO(errno.EPERM)
    for call in _REFUSED.split():
        yield refused, call, []
    # glibc goes on with clone, whose flags can be read, when there is no clone3.
    yield pyseccomp.ERRNO(errno.ENOSYS), "clone3", []
    for flag in _NEW_NAMESPACES:
        yield refused, "clone", [is_int(0, flag, flag)]
    for request in _TERMINAL_INJECTION:
        yield refused, "ioctl", [is_int(1, request)]
    no_family = pyseccomp.ERRNO(errno.EAFNOSUPPORT)
    for family in set(range(_NUM_FAMILIES)) - _FAMILIES:
        yield no_family, "socket", [is_int(0, family)]
        yield no_family, "socketpair", [is_int(0, family)]
    no_protocol = pyseccomp.ERRNO(errno.EPROTONOSUPPORT)
    for family in (socket.AF_INET, socket.AF_INET6):
        for kind in set(range(_NUM_SOCKET_TYPES)) - {socket.SOCK_STREAM}:
            yield no_protocol, "socket", [is_int(0, family), is_int(1, kind, _SOCKET_TYPE_MASK)]
        for protocol in _PROTOCOLS:
            yield no_protocol, "socket", [is_int(0, family), is_int(2, protocol)]
