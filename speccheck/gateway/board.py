"""Decisions in shared memory: one process writes them, every worker reads them at every request.

A small file that all map: a counter, and two slots of JSON. A new value goes into the slot that
nobody is told to read, then the counter is moved on; a slot carries its own counter and a checksum,
so that a reader who is overtaken by two writes sees that and reads again. Reading an unchanged
board costs one look at the counter. Beside it each worker has a number of its own, how many
requests it has in flight on the speculative arm, which all of them sum up.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_WORKERS = 64
_SLOT_BYTES = 1 << 20
_COUNTS_AT = 64
_SLOTS_AT = 4096
_HEAD = struct.Struct("<QII")  # counter, length, checksum
_SIZE = _SLOTS_AT + 2 * _SLOT_BYTES
_TRIES = 1000


class Board:
    """The mapped file. `Board.create` for the writer, `Board(path)` for the readers."""

    def __init__(self, path: Path) -> None:
        """Map an existing board. OSError where there is none."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._counter = memoryview(self._map)[:8].cast("Q")
        self._counts = memoryview(self._map)[_COUNTS_AT : _COUNTS_AT + 8 * MOST_WORKERS].cast("Q")
        self._seen = 0
        self._value: dict[str, Any] = {}

    @classmethod
    def create(cls, path: Path, value: Mapping[str, Any]) -> Board:
        """Make a board that says `value`. OSError where it cannot be written."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        board = cls(path)
        board.publish(value)
        return board

    @property
    def generation(self) -> int:
        """How often the board was written."""
        return self._counter[0]

    def publish(self, value: Mapping[str, Any]) -> int:
        """Say something else from now on; returns the generation. One process only.

        ValueError where it does not fit.
        """
        payload = json.dumps(value, separators=(",", ":")).encode()
        if len(payload) > _SLOT_BYTES - _HEAD.size:
            raise ValueError(f"{len(payload)} bytes do not fit the board")
        number = self._counter[0] + 1
        at = _slot(number)
        checksum = zlib.crc32(payload, number & 0xFFFFFFFF)
        self._map[at + _HEAD.size : at + _HEAD.size + len(payload)] = payload
        self._map[at : at + _HEAD.size] = _HEAD.pack(number, len(payload), checksum)
        self._counter[0] = number
        return number

    def read(self) -> dict[str, Any]:
        """What the board says now: always one whole value, never parts of two.

        The same object as before where nothing was published since.
        """
        for _ in range(_TRIES):
            number = self._counter[0]
            if number == self._seen:
                break
            at = _slot(number)
            written, length, checksum = _HEAD.unpack_from(self._map, at)
            if written != number or length > _SLOT_BYTES - _HEAD.size:
                continue  # overtaken by the writer
            payload = self._map[at + _HEAD.size : at + _HEAD.size + length]
            if zlib.crc32(payload, number & 0xFFFFFFFF) == checksum:
                self._value, self._seen = json.loads(payload), number
                break
        return self._value

    def set_count(self, worker: int, n: int) -> None:
        """A worker's own number."""
        self._counts[worker] = n

    def total(self) -> int:
        """The sum over all workers."""
        return sum(self._counts)

    def close(self) -> None:
        """Unmap; the file stays."""
        self._counter.release()
        self._counts.release()
        self._map.close()


def _slot(number: int) -> int:
    return _SLOTS_AT + (number & 1) * _SLOT_BYTES
