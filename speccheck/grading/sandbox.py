"""Patterns and model-written code in a process of their own, walled off by the kernel.

Two walls. The kernel's: limits on CPU, memory, file size and open files, and a seccomp filter that
no code in the process can lift, under which there are no sockets, no new processes or programs, no
signals to others, no writing, renaming or deleting of files. And Python's: an audit hook that gives
a readable reason for most of the same, and keeps reading within the standard library. The hook is
courtesy, the filter is the wall: code that knows CPython well can get around the hook.

A machine where the filter cannot be set (another system than Linux, another processor than x86-64
or ARM64) runs no code of a model; the check is then not applicable, and says so. What no sandbox of
this kind can promise: the tests run beside the answer, so an answer that sets out to fool its own
tests may pass them. It can do no harm beyond that.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

CPU_LIMIT_S = 5
"""CPU time of one code or pattern run: what an endless loop uses up, however busy the machine."""

TIME_LIMIT_S = 20.0
"""Wall clock of the same: what a sleeping one uses up. Wide, since a busy machine is no failure."""

MEMORY_MB = 512

UNSAFE = "cannot be walled off: "
"""Beginning of the word that says why no code is run here."""


def match(pattern: str, text: str) -> str:
    """Match, no match, or what went wrong, for a pattern against a whole text."""
    return _in_child(_MATCH, {"pattern": pattern, "text": text})


def run_tests(source: str, tests: str) -> str:
    """Run Python and its tests: passed, or what went wrong; see `UNSAFE`."""
    return _in_child(_RUN, {"source": source, "tests": tests, "denied": _DENIED})


# Number on x86-64 and on ARM64 (None: that machine does not have the call).
_CALLS: Mapping[str, tuple[int | None, int | None]] = {
    # the network
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # programs and processes (clone and openat are looked at more closely, see _FILTER)
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "setns": (308, 268),
    "unshare": (272, 97),
    # files
    "openat2": (437, 437),
    "creat": (85, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),
    # shared memory, the kernel itself
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_setup": (206, 0),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "swapon": (167, 224),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "seccomp": (317, 277),
}

_DENIED = {
    machine: sorted(n for numbers in _CALLS.values() if (n := numbers[at]) is not None)
    for at, machine in enumerate(("x86_64", "aarch64"))
}

_LIMITS = """
import json, os, resource, sys
job = json.loads(sys.stdin.buffer.read())
result_fd = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
def say(word, token=job["token"]):
    os.write(result_fd, (token + json.dumps(word)).encode())
    os._exit(0)
for name, most in (
    ("RLIMIT_CPU", job["seconds"]), ("RLIMIT_AS", job["bytes"]), ("RLIMIT_FSIZE", 65536),
    ("RLIMIT_CORE", 0), ("RLIMIT_NOFILE", 32), ("RLIMIT_NPROC", 0),
):
    resource.setrlimit(getattr(resource, name), (most, most))
"""

_MATCH = (
    _LIMITS
    + """
import re
say("match" if re.fullmatch(job["pattern"], job["text"], re.DOTALL) else "no match")
"""
)

# Classic BPF over (call number at 0, architecture at 4, arguments from 16): kill the process for
# another architecture's calls (they have other numbers), refuse what is denied, let the rest pass.
_FILTER = """
def wall(denied):
    import ctypes, platform, struct
    machine = platform.machine()
    known = {"x86_64": (0xC000003E, 56, 257, 2), "aarch64": (0xC00000B7, 220, 56, None)}
    if sys.platform != "linux" or machine not in known or sys.maxsize < 2**32:
        return sys.platform + " on " + machine
    arch, clone, openat, open_ = known[machine]
    load, equal, at_least, any_of, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow, refuse, absent = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    steps = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    if machine == "x86_64":  # the x32 calls
        steps += [(at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]
    for number in denied[machine]:
        steps += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    steps += [(equal, 0, 1, 435), (give, 0, 0, absent)]  # clone3: glibc then uses clone
    steps += [  # a thread is fine, a process is not
        (equal, 0, 4, clone), (load, 0, 0, 16), (any_of, 1, 0, 0x10000), (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    for number, flags_at in ((openat, 32), (open_, 24)):
        if number is not None:
            steps += [
                (equal, 0, 4, number), (load, 0, 0, flags_at), (any_of, 0, 1, writing),
                (give, 0, 0, refuse), (give, 0, 0, allow),
            ]
    steps += [(give, 0, 0, allow)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *s) for s in steps))
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int] + 4 * [ctypes.c_void_p]
    libc.syscall.argtypes = [ctypes.c_long] + 4 * [ctypes.c_void_p]
    made = Program(len(steps), ctypes.addressof(program))
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges: both walls below need it
    # Landlock (Linux 5.13): reading files and folders only in these; where the kernel lacks it
    # the audit hook alone says what may be read.
    reading = ctypes.c_uint64(0x4 | 0x8)
    ruleset = libc.syscall(444, ctypes.addressof(reading), 8, 0, 0)
    if ruleset >= 0:
        for folder in (os.path.dirname(os.__file__), "/usr/lib", "/usr/lib64", "/lib", "/lib64",
                       "/usr/local/lib", "/usr/share/zoneinfo", sys.base_prefix + "/lib"):
            if os.path.isdir(folder):
                fd = os.open(folder, os.O_PATH)
                rule = ctypes.create_string_buffer(struct.pack("=Qi", 0x4 | 0x8, fd))
                libc.syscall(445, ruleset, 1, ctypes.addressof(rule), 0)
                os.close(fd)
        libc.syscall(446, ruleset, 0, 0, 0)
        os.close(ruleset)
    if libc.prctl(22, 2, ctypes.addressof(made), 0, 0):
        return "seccomp: " + os.strerror(ctypes.get_errno())
    return ""
"""

_RUN = (
    _LIMITS
    + _FILTER
    + """
def main():
    import builtins
    library = os.path.dirname(os.__file__) + os.sep
    refused = (
        "socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system",
        "os.kill", "os.putenv", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link",
        "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.listdir", "os.scandir", "shutil.",
        "ctypes.", "pty.", "signal.", "mmap.", "fcntl.", "syslog.", "webbrowser.", "urllib.",
        "ftplib.", "sqlite3.", "resource.", "gc.get_",
    )
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    real, listing = os.path.realpath, ("os.listdir", "os.scandir")
    def guard(event, args):
        if event.startswith(refused):
            if event in listing and str(args[0]).startswith(library):
                return
            raise PermissionError(event + " is refused")
        if event == "open":
            path, mode, flags = args
            reading = not (flags or 0) & writing
            if not (reading and isinstance(path, str) and real(path).startswith(library)):
                raise PermissionError("opening files is refused")
    def told(error):
        return type(error).__name__ + ": " + str(error)[:200]
    say, source, tests = globals()["say"], job["source"], job["tests"]
    try:
        answer = compile(source, "answer", "exec")
    except BaseException as error:
        say("does not compile: " + told(error))
    checks = compile(tests, "tests", "exec")
    modules = set(sys.modules)
    unsafe = wall(job["denied"])
    if unsafe:
        say(job["unsafe"] + unsafe)
    for name in set(sys.modules) - modules:  # ctypes: the answer imports it anew, and is refused
        del sys.modules[name]
    space = {"__name__": "answer", "__builtins__": builtins}
    sys.addaudithook(guard)
    job.clear()
    # The answer may import this module: it finds nothing of ours in it.
    for name in [n for n in globals() if n not in ("os", "sys", "json", "result_fd")]:
        del globals()[name]
    try:
        exec(answer, space)
    except BaseException as error:
        say("fails when run: " + told(error))
    try:
        exec(checks, space)
    except AssertionError as error:
        say("fails the test " + tests.splitlines()[error.__traceback__.tb_next.tb_lineno - 1])
    except BaseException as error:
        say("fails when tested: " + told(error))
    say("passed")
main()
"""
)


def _in_child(program: str, job: Mapping[str, Any]) -> str:
    """Run a program of ours on a job in a limited process and return the word it says.

    Isolated mode, empty environment, empty folder, limits on CPU, memory, files and processes, a
    wall-clock limit on the whole process group. The word comes back behind a random token in a file
    that cannot outgrow the file-size limit: an answer that exits or prints early has said nothing.
    """
    token = secrets.token_hex(16)
    limits = {"token": token, "seconds": CPU_LIMIT_S, "bytes": MEMORY_MB * 2**20, "unsafe": UNSAFE}
    payload = json.dumps({**job, **limits}).encode(errors="surrogatepass")
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", program],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        ) as child,
    ):
        try:
            child.communicate(payload, timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"ran over {TIME_LIMIT_S:g} s"
        finally:
            _end(child)
        said.seek(0)
        answer = said.read(65536).decode(errors="replace")
    _, found, word = answer.rpartition(token)
    if found:
        with contextlib.suppress(ValueError):
            return str(json.loads(word))
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"used over {CPU_LIMIT_S} s of CPU"
    return "ended without a result"


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
