"""Hooks: what a command and a webhook are told, and that neither holds anything up."""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from speccheck import console, context, hooks
from speccheck.config import HooksConfig
from speccheck.errors import UsageError
from speccheck.hooks import Event, Hooks
from speccheck.records import Estimate, RouteState, Transition

MOVED = Transition(
    route="chat",
    seq=3,
    at_ns=12,
    before=RouteState.ENABLED,
    after=RouteState.FELL_BACK,
    rule="max_error_rate",
    cohort="",
    estimate=Estimate(0.5, 0.25, float("inf"), 12, "beta-binomial e-process", 0.05),
    limit=0.01,
    unit="share",
    window_s=12.5,
    n=12,
    share=0.0,
    fallbacks=1,
    why="error rate 50% is over $(touch pwned) `the` limit\nof 1%",
)
EVENT = Event("roll", MOVED, 1_790_000_000_123_000_000)


class Receiver:
    """A webhook's other end: answers as told, and remembers what came."""

    def __init__(self) -> None:
        self.came: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        self.url = ""
        self.hold = threading.Event()
        self.hold.set()


@contextmanager
def receiver(
    *answers: int, host: str = "127.0.0.1", wrap: Callable[..., Any] | None = None
) -> Iterator[Receiver]:
    told = Receiver()
    told.answers = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.came.append((dict(self.headers), body))
            told.hold.wait(30)
            self.send_response(told.answers.pop(0) if told.answers else 200)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    server = Server((host, 0), Handler)
    if wrap is not None:
        server.socket = wrap(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    shown = f"[{host}]" if ":" in host else host
    told.url = f"http://{shown}:{server.server_port}/hook?token=s3cret"
    try:
        yield told
    finally:
        told.hold.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between tries that take no time; the pauses asked for."""
    pauses: list[float] = []

    def wait(_: threading.Event, pause_s: float | None = None) -> bool:
        pauses.append(pause_s or 0.0)
        return False

    monkeypatch.setattr(hooks, "_pause", wait)
    return pauses


def fired(config: HooksConfig, *events: Event) -> list[str]:
    said: list[str] = []
    told = Hooks(config, say=said.append)
    for event in events or (EVENT,):
        told.fire(event)
    told.close()
    assert told.lost == len(said)
    return said


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_command_finds_the_facts_in_its_environment(tmp_path):
    """Each fact by its name, missing ones empty; nothing of it is read by a shell."""
    out = tmp_path / "env.json"
    code = f"import json, os; json.dump(dict(os.environ), open({str(out)!r}, 'w'))"
    assert fired(HooksConfig(command_timeout_s=60, command=python(code))) == []
    env = json.loads(out.read_text())
    assert env["SPECCHECK_ROUTE"] == "chat"
    assert (env["SPECCHECK_BEFORE"], env["SPECCHECK_AFTER"]) == ("enabled", "fell_back")
    assert (env["SPECCHECK_VALUE"], env["SPECCHECK_LOW"]) == ("0.5", "0.25")
    assert env["SPECCHECK_HIGH"] == ""  # infinite: no bound
    assert env["SPECCHECK_LIMIT"] == "0.01"
    assert env["SPECCHECK_WHY"] == MOVED.why
    assert env["SPECCHECK_AT"] == "2026-09-21T14:13:20.123Z"
    assert json.loads(env["SPECCHECK_JSON"])["estimate"]["n"] == 12
    assert not Path("pwned").exists()


def test_a_webhook_gets_a_signed_body(monkeypatch):
    """The receiver can derive the signature from timestamp and body with the key alone."""
    monkeypatch.setenv("HOOK_KEY", "key-1")
    with receiver() as told:
        config = HooksConfig(webhook_timeout_s=60, webhook=told.url, webhook_secret_env="HOOK_KEY")
        assert fired(config) == []
    ((headers, body),) = told.came
    stamp = headers["X-Speccheck-Timestamp"]
    wanted = hmac.new(b"key-1", f"{stamp}.".encode() + body, hashlib.sha256).hexdigest()
    assert headers["X-Speccheck-Signature"] == f"sha256={wanted}"
    assert abs(int(stamp) - time.time()) < 60
    assert json.loads(body)["after"] == "fell_back"
    assert json.loads(body)["rollout"] == "roll"


def test_the_secret_is_not_handed_to_the_command(monkeypatch, tmp_path):
    """The command needs no key of the webhook's."""
    monkeypatch.setenv("HOOK_KEY", "key-1")
    out = tmp_path / "env"
    code = f"import os; open({str(out)!r}, 'w').write(os.environ.get('HOOK_KEY', 'none'))"
    assert (
        fired(
            HooksConfig(command_timeout_s=60, command=python(code), webhook_secret_env="HOOK_KEY")
        )
        == []
    )
    assert out.read_text() == "none"


def test_a_secret_that_is_not_set_is_an_error(monkeypatch):
    """Unsigned where a signature was asked for would be refused, or worse, taken."""
    monkeypatch.delenv("HOOK_KEY", raising=False)
    with pytest.raises(UsageError, match="HOOK_KEY is not set"):
        Hooks(HooksConfig(webhook="http://x", webhook_secret_env="HOOK_KEY"), say=print)


def test_a_run_that_could_not_sign_is_not_begun(monkeypatch, tmp_path):
    """Its canary would find out when the first route fell back, and tell nobody."""
    monkeypatch.delenv("HOOK_KEY", raising=False)
    path = tmp_path / "rollout.yaml"
    path.write_text(
        "name: r\nspeculation: {method: ngram, num_speculative_tokens: 3}\n"
        "routes: [{name: chat, tasks: ['*']}]\n"
        "fallback: {hooks: {webhook: 'http://x', webhook_secret_env: HOOK_KEY}}\n"
    )
    with (
        pytest.raises(UsageError, match="HOOK_KEY is not set"),
        context.open_run(path, tmp_path / "out", console.Reporter(), fresh=False),
    ):
        pass
    assert not (tmp_path / "out").exists()


def test_a_webhook_is_tried_again_with_longer_pauses(at_once):
    """Until it takes it; every try is the same delivery."""
    with receiver(500, 503, 429, 200) as told:
        assert fired(HooksConfig(webhook_timeout_s=60, webhook=told.url)) == []
    assert at_once == [1.0, 2.0, 4.0]
    assert len({headers["X-Speccheck-Delivery"] for headers, _ in told.came}) == 1
    assert len(told.came) == 4


def test_a_webhook_that_never_takes_it_is_said_without_its_url(at_once):
    """After all tries; a URL may be a secret."""
    with receiver(*[500] * 9) as told:
        (said,) = fired(HooksConfig(webhook_timeout_s=60, webhook=told.url, webhook_attempts=3))
    assert len(told.came) == 3
    assert said == "webhook hook, chat: HTTP 500; given up after 3 tries"


@pytest.mark.parametrize("status", [400, 404, 302])
def test_what_will_not_change_is_not_tried_again(status, at_once):
    """A refusal stands, and a redirect is not followed with a signed body."""
    with receiver(status) as told:
        (said,) = fired(HooksConfig(webhook_timeout_s=60, webhook=told.url))
    assert len(told.came) == 1
    assert f"HTTP {status}" in said


@contextmanager
def raw(*parts: bytes) -> Iterator[str]:
    """A receiver that says these bytes and then nothing more, to each who comes; its URL."""
    ended = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            for part in parts:
                self.request.sendall(part)
            ended.wait(60 if len(parts) > 1 else 0)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/hook?token=s3cret"
        finally:
            ended.set()
            server.shutdown()


@pytest.mark.parametrize(
    "parts",
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n",),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50_000 + b"\r\n",),
        (b"",),
        (b"HTTP/1.1 200 OK\r\n", b"x-slow: "),
    ],
    ids=["no HTTP", "huge head", "closed at once", "a head without an end"],
)
def test_a_receiver_that_answers_nonsense_loses_one_telling_and_not_all(parts):
    """Each event is told and its loss is said, without the URL; what is next is told, too."""
    with raw(*parts) as url:
        config = HooksConfig(webhook=url, webhook_attempts=1, webhook_timeout_s=1.0)
        said = fired(config, EVENT, Event("roll", MOVED, 2))
    assert len(said) == 2
    assert all("no answer" in one and "s3cret" not in one for one in said)


def test_a_huge_answer_is_not_read():
    """The status is all that is asked of it."""
    with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", b"x" * 1000) as url:
        assert fired(HooksConfig(webhook=url, webhook_attempts=1)) == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate")
def test_a_certificate_that_nobody_vouches_for_is_not_trusted(tmp_path):
    """A body is not handed to whoever listens at that address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"),
            *("-days", "1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    context.load_cert_chain(cert, key)
    with receiver(wrap=context.wrap_socket) as told:
        config = HooksConfig(webhook=told.url.replace("http:", "https:"), webhook_attempts=1)
        (said,) = fired(config)
    assert told.came == []
    assert "SSLCertVerificationError" in said


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_webhook_at_an_ipv6_address():
    """In brackets, as in any URL."""
    with receiver(host="::1") as told:
        assert fired(HooksConfig(webhook_timeout_s=60, webhook=told.url)) == []
    assert told.came[0][0]["Host"].startswith("[::1]:")


def test_a_user_in_the_webhooks_address_is_sent_as_such():
    """As browsers and curl do."""
    with receiver() as told:
        url = told.url.replace("://", "://pager:pw@")
        assert fired(HooksConfig(webhook_timeout_s=60, webhook=url)) == []
    assert told.came[0][0]["Authorization"].startswith("Basic ")


def test_a_telling_that_cannot_be_said_does_not_end_the_hook():
    """Whoever read our words is gone: the next transition is told all the same."""

    def gone(_: str) -> None:
        raise BrokenPipeError

    with receiver(404) as told:
        line = Hooks(HooksConfig(webhook_timeout_s=60, webhook=told.url), say=gone)
        line.fire(EVENT)
        line.fire(EVENT)
        line.close()
    assert (len(told.came), line.lost) == (2, 1)


@pytest.mark.parametrize(
    "url",
    ["http://", "https:///hook", "ftp://x", "http://x:99999/", "http://[::1/", "http://a b/", ""],
)
def test_an_address_that_nothing_can_be_sent_to_is_an_error_at_once(url):
    """And not when the first route falls back; the address may be a secret."""
    with pytest.raises(ValueError, match="not an http:// or https:// URL"):
        HooksConfig(webhook=url)


def test_nobody_there_is_tried_again(at_once):
    """A refused connection is no refusal."""
    with receiver() as told:
        pass
    (said,) = fired(HooksConfig(webhook_timeout_s=60, webhook=told.url, webhook_attempts=2))
    assert "no answer" in said
    assert at_once == [1.0]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (python("import sys; sys.exit('no route to pager')"), "ended with 1: no route to pager"),
        (("/no/such/program",), "could not be started"),
    ],
)
def test_a_command_that_fails_is_said(command, why):
    """With its last word."""
    (said,) = fired(HooksConfig(command=command))
    assert why in said


def test_a_command_that_hangs_is_ended_with_all_its_children(tmp_path):
    """Its children, too, and without waiting for a pipe that they hold."""
    pid = tmp_path / "pid"
    command = ("/bin/sh", "-c", f"sleep 600 & echo $! > {pid}; wait")
    said: list[str] = []
    told = Hooks(HooksConfig(command=command, command_timeout_s=5.0), say=said.append)
    told.fire(EVENT)
    told.close(60)
    assert "did not end within 5 s" in said[0]
    until = time.monotonic() + 20
    while _alive(int(pid.read_text())) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _alive(int(pid.read_text()))


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_webhook_that_hangs_delays_neither_the_caller_nor_the_command(tmp_path):
    """Each hook has its own line."""
    done = tmp_path / "done"
    with receiver() as told:
        told.hold.clear()
        config = HooksConfig(
            webhook=told.url, webhook_timeout_s=60, command=python(f"open({str(done)!r}, 'w')")
        )
        line = Hooks(config, say=print)
        line.fire(EVENT)
        _until(done.exists)
        told.hold.set()
        line.close()
    assert len(told.came) == 1


def test_more_than_can_wait_is_counted_and_said():
    """The row in the store is there all the same."""
    said: list[str] = []
    with receiver() as told:
        told.hold.clear()
        line = Hooks(HooksConfig(webhook_timeout_s=60, webhook=told.url), say=said.append)
        line.fire(EVENT)
        _until(lambda: len(told.came) == 1)
        for _ in range(101):
            line.fire(EVENT)
        assert line.lost == 1
        told.hold.set()
        line.close(60)
    assert said == ["hook, chat: 100 others wait already"]


def test_they_come_in_order():
    """What happened first is told first."""
    with receiver() as told:
        events = [Event("roll", MOVED, n) for n in range(20)]
        assert fired(HooksConfig(webhook_timeout_s=60, webhook=told.url), *events) == []
    stamps = [json.loads(body)["at"] for _, body in told.came]
    deliveries = [headers["X-Speccheck-Delivery"] for headers, _ in told.came]
    assert deliveries == [event.delivery for event in events]
    assert stamps == sorted(stamps)


def test_without_hooks_nothing_is_started():
    """No thread for nothing."""
    before = threading.active_count()
    assert fired(HooksConfig()) == []
    assert threading.active_count() == before


def _until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_secret_in_the_settings_is_refused():
    """The key comes from the environment only."""
    with pytest.raises(ValueError, match="Extra inputs"):
        HooksConfig(webhook="http://x", webhook_secret="key")
