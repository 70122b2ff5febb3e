"""The engine's own thread: requests in by a queue, outputs out by a callback, one batch a step.

A thread and not a process, because ONNX Runtime lets go of the interpreter while it computes: the
HTTP side runs in that time. Requests that arrive or leave while a step computes take effect before
the next one.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from speccheck.engine.engine import Engine
from speccheck.engine.sequence import Output, Request
from speccheck.errors import SpeccheckError


@dataclass(frozen=True)
class _Abort:
    request_id: str


@dataclass(frozen=True)
class _ResetPrefixCache:
    pass


@dataclass(frozen=True)
class _Stop:
    pass


class EngineThread:
    """Runs an engine until stopped. `deliver` is called on the thread with each step's outputs.

    After a failure inside a step the engine's state is unknown: every request in flight ends with
    finish_reason "error", `dead` says why, and later requests end the same way.
    """

    def __init__(self, engine: Engine, deliver: Callable[[list[Output]], None]) -> None:
        self.engine = engine
        self.dead: str | None = None
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Request | _Abort | _ResetPrefixCache | _Stop] = (
            queue.SimpleQueue()
        )
        self._known: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hand a request over; its outputs arrive through `deliver`."""
        self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        """Drop a request before the next step; no more outputs come for it."""
        self._inbox.put(_Abort(request_id))

    def reset_prefix_cache(self) -> None:
        """Forget cached prompts before the next step; requests submitted later find none."""
        self._inbox.put(_ResetPrefixCache())

    def stop(self) -> None:
        """End the thread after the step in progress."""
        self._inbox.put(_Stop())
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while True:
            idle = self.dead is not None or not self.engine.n_unfinished
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                self._step()
                continue
            if isinstance(message, _Stop):
                return
            if isinstance(message, _ResetPrefixCache):
                self.engine.reset_prefix_cache()
            elif isinstance(message, _Abort):
                self._known.discard(message.request_id)
                self.engine.abort(message.request_id)
            else:
                self._add(message)

    def _add(self, request: Request) -> None:
        if self.dead is None:
            try:
                self.engine.add(request)
            except SpeccheckError:
                traceback.print_exc(file=sys.stderr)
            else:
                self._known.add(request.request_id)
                return
        self._deliver([_failed(request.request_id)])

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait forever
            traceback.print_exc(file=sys.stderr)
            self.dead = f"{type(error).__name__}: {error}"
            outputs = [_failed(name) for name in sorted(self._known)]
        self._known.difference_update(o.request_id for o in outputs if o.finish_reason)
        if outputs:
            self._deliver(outputs)


def _failed(request_id: str) -> Output:
    return Output(request_id, [], "", finish_reason="error")
