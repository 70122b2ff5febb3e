"""Model-written code cannot get out: the kernel's wall stands without the audit hook, and a hook
that an answer cannot reach gives the readable reasons.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from speccheck.grading import grade, sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the wall is Linux's seccomp")

BARE = sandbox._RUN.replace("sys.addaudithook(guard)", "pass")


@pytest.fixture
def bare(monkeypatch):
    """The sandbox without its audit hook: whatever is refused now, the kernel refuses."""
    assert BARE != sandbox._RUN
    monkeypatch.setattr(sandbox, "_RUN", BARE)


def attempt(source: str) -> str:
    return sandbox.run_tests(source, "pass")


NETWORK = [
    "import socket; socket.socket()",
    "import socket; socket.socketpair()",
    "import socket; socket.socket(socket.AF_UNIX)",
    "import ctypes; r = ctypes.CDLL(None).socket(2, 1, 0)\nif r < 0: raise PermissionError",
]
PROCESSES = [
    "import os; os.fork()",
    "import os; os.execv('/bin/true', ['true'])",
    "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "import subprocess; subprocess.run(['/bin/true'])",
    "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "import os; os.kill(os.getppid(), 9)",
    "import os; os.pidfd_open(os.getppid())",
    "import ctypes; r = ctypes.CDLL(None).ptrace(16, 1, 0, 0)\nif r < 0: raise PermissionError",
    "import ctypes; r = ctypes.CDLL(None).unshare(0x10000000)\nif r < 0: raise PermissionError",
]


def let_through(deeds: list[str], **names: str) -> str:
    """What of these did not end in a PermissionError, each tried in one and the same process."""
    return attempt(
        f"import os\nlet_through = []\nnames = {names!r}\n"
        f"for deed in {deeds!r}:\n"
        "    try:\n        exec(deed, names | {'os': os})\n"
        "    except PermissionError:\n        continue\n"
        "    except BaseException as error:\n        deed += ' -> ' + repr(error)\n"
        "    let_through.append(deed)\n"
        "if let_through:\n    raise ValueError(let_through)"
    )


def test_the_kernel_refuses_network_and_processes(bare):
    """No socket, no process, no program and no signal, however Python is gone around."""
    assert let_through(NETWORK + PROCESSES) == "passed"


def test_what_is_let_through_is_noticed(bare):
    """The check itself can fail."""
    assert "ValueError: ['os.getpid()']" in let_through(["os.getpid()", *NETWORK[:1]])


def test_a_listening_port_of_ours_is_never_reached(bare):
    """Nothing connects to a server that waits on this machine's loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        port = server.getsockname()[1]
        said = attempt(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
        assert "PermissionError" in said
        with pytest.raises(BlockingIOError):
            server.accept()


CHANGES = [
    "open(p, 'w')",
    "open(p, 'a')",
    "open(p, 'r+b')",
    "open(p + 'new', 'x')",
    "os.unlink(p)",
    "os.rename(p, p + '2')",
    "os.truncate(p, 0)",
    "os.chmod(p, 0)",
    "os.symlink('/', p + 'l')",
    "os.link(p, p + 'l')",
    "os.mkdir(p + 'd')",
    "os.rmdir(os.path.dirname(p))",
    "os.utime(p)",
    "os.setxattr(p, 'user.x', b'')",
    "os.mknod(p + 'n')",
    "os.memfd_create('x')",
]


def test_the_kernel_refuses_every_change_of_a_file(bare, tmp_path):
    """A file of ours is the same afterwards, and alone in its folder."""
    path = tmp_path / "ours"
    path.write_text("kept")
    before = path.stat()
    assert let_through(CHANGES, p=str(path)) == "passed"
    assert path.read_text() == "kept"
    assert path.stat()[:7] == before[:7]  # its time of reading may differ
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "source",
    [
        # another architecture's socket call, whose number is another one
        (
            "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
            "m.write(bytes.fromhex('b814000000cd80c3'))\n"
            "print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))())"
        ),
        "import ctypes; ctypes.CDLL(None).syscall(0x40000000 + 41, 2, 1, 0)",
    ],
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="calls of an x86-64 processor")
def test_calls_of_another_architecture_end_the_process(bare, source):
    """The filter's numbers hold for one architecture; the others are not let in beside it."""
    assert attempt(source) == "ended without a result"


def test_threads_are_no_processes(bare):
    """What the filter must not break: it is the process that is refused, not the thread."""
    source = (
        "import threading\ntry:\n    t = threading.Thread(target=print); t.start(); t.join()\n"
        "except RuntimeError: pass  # RLIMIT_NPROC, where we are not root"
    )
    assert attempt(source) == "passed"


def test_memory_and_processor_time_are_limited(bare, monkeypatch):
    """A gigabyte is refused, and an endless loop ends by its own processor time."""
    monkeypatch.setattr(sandbox, "CPU_LIMIT_S", 1)
    assert "MemoryError" in attempt("bytearray(10**9)")
    assert attempt("while True: pass") == "used over 1 s of CPU"
    assert "not allowed" in attempt(
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))"
    )


@pytest.mark.parametrize(
    "source",
    [
        "import __main__; __main__.refused = (); import socket; socket.socket()",
        "import __main__; __main__.say('passed')",
        "import __main__; __main__.main.__code__",
        "import sys; sys.modules['__main__'].job",
        "import gc; gc.get_objects()",
    ],
)
def test_the_harness_is_out_of_reach(source):
    """An answer that imports the harness finds neither its refusals nor its word for passing."""
    assert attempt(source) != "passed"


def test_secrets_of_the_parent_cannot_be_read(monkeypatch):
    """Files outside the standard library stay shut, /proc with our environment among them."""
    for path in ("/etc/passwd", f"/proc/{os.getpid()}/environ", str(Path(__file__))):
        assert "refused" in attempt(f"open({path!r}).read()")
        assert "refused" in attempt(f"import os; os.open({path!r}, os.O_RDONLY)")


def test_a_machine_that_cannot_wall_off_runs_nothing(monkeypatch, tmp_path):
    """Where the filter cannot be set, no code runs and the check says so: it is no verdict."""
    elsewhere = sandbox._RUN.replace("platform.machine()", "'vax'")
    monkeypatch.setattr(sandbox, "_RUN", elsewhere)
    found = grade({"kind": "code", "tests": "pass"}, "x = 1", code_execution="subprocess")
    assert found.outcome == "not_applicable"
    assert found.reason == "code is not run here: it cannot be walled off: linux on vax"
