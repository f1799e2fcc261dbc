"""Shut a process in, with what Linux gives every user: `unshare`, as the command of that name.

A sealed process reaches no network, not even this machine's own services. It can write, empty, move
and delete no file outside of one folder of its own, which is gone afterwards. What it starts ends
with it. It still reads whatever its user may read, and takes processor time and memory. Many
containers and some distributions refuse these calls; then the process goes on without a seal, and
`can_seal` tells so.
"""

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
from pathlib import Path

NEW_USER, NEW_NETWORK, NEW_MOUNTS = 0x10000000, 0x40000000, 0x00020000
NEW_PROCESSES, NEW_MESSAGES = 0x20000000, 0x08000000
MOUNT_SETATTR, HERE, RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
DIE_WITH_PARENT, NO_NEW_RIGHTS, CAPABILITIES = 1, 38, 0x20080522


def seal(folder: str) -> bool:
    """Shut this process in and go on in a child of it; False where the system refuses.

    * ``folder``: an empty one, which stays as it is: what is written there is in memory
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_USER | NEW_NETWORK | NEW_MOUNTS | NEW_PROCESSES | NEW_MESSAGES):
        return False
    try:  # the same user inside, without any rights beyond a user's
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError:
        return False
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY)
    size = ctypes.sizeof(attributes)
    refused = libc.syscall(MOUNT_SETATTR, HERE, b"/", RECURSIVE, ctypes.byref(attributes), size)
    refused |= libc.mount(b"own", os.fsencode(folder), b"tmpfs", 0, b"size=16m")
    os.chdir(folder)
    if worker := os.fork():  # the first process of its own world: all others there end with it
        status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        if status < 0:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(max(status, 0))
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
    # Whoever makes such a world may change it, and its mounts too. That ends here.
    refused |= libc.prctl(NO_NEW_RIGHTS, 1, 0, 0, 0)
    refused |= libc.capset((ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)())
    return not refused


def can_seal() -> bool:
    """Whether `seal` holds here, tried in a process of its own."""
    if sys.platform != "linux":
        return False
    with tempfile.TemporaryDirectory() as folder:
        process = os.fork()
        if not process:
            try:
                os._exit(0 if seal(folder) else 1)
            finally:
                os._exit(1)
        return os.waitpid(process, 0)[1] == 0
