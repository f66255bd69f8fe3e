"""Run the command line as if on a Mac: without the functions and files that only Linux has."""

import os
import sys

_SCRIPT = """
import fcntl, os, resource, select, signal, socket, sys, sysconfig
import aiohttp, platform, urllib.request  # these read the name of the system when they are imported
sysconfig.get_config_vars(), platform.uname()
sys.platform = "darwin"
os.geteuid = lambda: 501  # root has another event loop
MISSING = {
    os: "copy_file_range eventfd getresuid memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate "
        "sched_getaffinity sched_setaffinity setns setresgid setresuid splice unshare waitid O_PATH "
        "MFD_ALLOW_SEALING MFD_CLOEXEC",
    fcntl: "F_ADD_SEALS F_GETPIPE_SZ F_OFD_SETLK F_SETPIPE_SZ",
    resource: "RLIMIT_MSGQUEUE RLIMIT_SIGPENDING prlimit",
    select: "EPOLLIN epoll",
    signal: "SIGRTMIN pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: "AF_ALG AF_NETLINK AF_PACKET SO_PEERCRED",
}
for module, names in MISSING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

def hide_files(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])

sys.addaudithook(hide_files)
from toolroll.cli.app import main
main()
"""


def command(*arguments: str) -> list[str]:
    """Return a command that runs `toolroll` with these arguments."""
    return [sys.executable, "-c", _SCRIPT, *arguments]


def environment() -> dict[str, str]:
    """Return the environment of the command, without the address of a sandbox."""
    inherited = {name: value for name, value in os.environ.items() if name != "SANDBOX_FUSION_URL"}
    return {**inherited, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
