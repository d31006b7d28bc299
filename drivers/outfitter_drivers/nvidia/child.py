"""The process that has NVML open: answers the manager's requests, one after the other, and ends with it.

It ends when its input ends. On SIGUSR1 it lets go of the GPUs: it names the sender and ends, so that the GPUs can be
reset or partitioned. The manager starts no other one while the sender lives. Only root and the same user can send it.

NVIDIA's library may print. So the answers have a descriptor of their own, and standard output goes to standard error.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from outfitter_drivers.nvidia.codes import LIBRARY_NOT_FOUND, TIMEOUT
from outfitter_drivers.nvidia.library import UnusableLibraryError, load
from outfitter_drivers.nvidia.protocol import (
    MAX_REQUEST_BYTES,
    Answer,
    Failure,
    Request,
    decode_request,
    encoded,
    short,
)
from outfitter_drivers.nvidia.reading import Reader, handle_number
from outfitter_drivers.nvidia.snapshot import LARGEST, MOST_EVENTS, XID, Event

MODULE = "outfitter_drivers.nvidia.child"
RELEASE = signal.SIGUSR1

EVENTS = XID | 0x2 | 0x4000 | 0x8000
"""nvml.h: an Xid, a double-bit ECC error, a GPU that becomes unavailable, a new recovery action."""
_ALL = 0xFFFFFFFF
"""`gpuInstanceId` and `computeInstanceId` of an event about a whole GPU."""
_SIGNAL_POLL_S = 0.25


class Nvml:
    """NVML, once it is needed."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._reader: Reader | None = None
        self._set: Any = None
        self._watched: set[str] = set()
        self._unwatched: str | None = None

    def answer(self, request: Request) -> Answer:
        try:
            if self._reader is None:
                self._module.nvmlInit()
                self._reader = Reader(self._module)
            if request.do == "wait":
                return Answer(id=request.id, events=tuple(self._events(self._reader, request.seconds)))
            snapshot = self._reader.look()
            self._watch(self._reader)
            return Answer(id=request.id, snapshot=replace(snapshot, unwatched=self._unwatched))
        except self._module.NVMLError as error:
            missing = error.value == LIBRARY_NOT_FOUND
            return _failed(request.id, str(error), code=error.value, is_unusable=missing)

    def let_go(self) -> None:
        if self._reader is not None:
            self._module.nvmlShutdown()

    def _watch(self, reader: Reader) -> None:
        """Have NVML tell what happens to each GPU that was not watched yet."""
        nvml = self._module
        for uuid in reader.handles.keys() - self._watched:
            self._watched.add(uuid)
            try:
                if self._set is None:
                    self._set = nvml.nvmlEventSetCreate()
                kinds = nvml.nvmlDeviceGetSupportedEventTypes(reader.handles[uuid]) & EVENTS
                if kinds:
                    nvml.nvmlDeviceRegisterEvents(reader.handles[uuid], kinds, self._set)
                else:
                    self._unwatched = short(f"NVML knows no events of {uuid}")
            except nvml.NVMLError as error:
                self._unwatched = short(f"NVML does not watch {uuid}: {error}")

    def _events(self, reader: Reader, seconds: float) -> Iterator[Event]:
        """Those that have happened; the first is waited for."""
        if self._set is None:
            return
        # A GPU that dies does not tell its UUID any more.
        uuids = {handle_number(handle): uuid for uuid, handle in reader.handles.items()}
        wait = seconds
        for _ in range(MOST_EVENTS):
            try:
                data = self._module.nvmlEventSetWait_v2(self._set, int(wait * 1000))
            except self._module.NVMLError as error:
                if error.value == TIMEOUT:
                    return
                raise
            wait = 0
            yield Event(
                uuid=uuids.get(handle_number(data.device)),
                kind=min(data.eventType, LARGEST),
                data=min(data.eventData, LARGEST),
                gpu_instance=None if data.gpuInstanceId == _ALL else data.gpuInstanceId,
                compute_instance=None if data.computeInstanceId == _ALL else data.computeInstanceId,
            )


def main(prepare: Callable[[], None] = lambda: None) -> None:
    """Answer until the input ends. `prepare` is called before the library is loaded."""
    answers = os.dup(1)
    os.dup2(2, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [RELEASE])
    nvml: Nvml | None = None
    for request in _requests():
        if isinstance(request, int):
            if nvml is not None:
                nvml.let_go()
            _write(answers, Answer(id=0, released_for=request))
            return
        try:
            if nvml is None:
                prepare()
                nvml = Nvml(load())
            answer = nvml.answer(request)
        except UnusableLibraryError as error:
            answer = _failed(request.id, str(error), is_unusable=True)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything, and the parent must learn it
            answer = _failed(request.id, f"{type(error).__name__}: {error}")
        _write(answers, answer)


def _requests() -> Iterator[Request | int]:
    """The requests, and the process that wants the GPUs, if one asks."""
    line = bytearray()
    while True:
        ready, _, _ = select.select([0], [], [], _SIGNAL_POLL_S)
        if (sent := signal.sigtimedwait([RELEASE], 0)) is not None:
            yield sent.si_pid
            return
        if not ready:
            continue
        chunk = os.read(0, MAX_REQUEST_BYTES)
        if not chunk:
            return
        line += chunk
        while b"\n" in line:
            text, _, rest = line.partition(b"\n")
            line = bytearray(rest)
            yield decode_request(bytes(text))
        if len(line) > MAX_REQUEST_BYTES:
            sys.exit("a request is too long")


def _failed(request: int, words: str, *, code: int | None = None, is_unusable: bool = False) -> Answer:
    return Answer(id=request, failure=Failure(words=short(words, 2000), code=code, is_unusable=is_unusable))


def _write(descriptor: int, answer: Answer) -> None:
    rest = memoryview(encoded(answer))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


if __name__ == "__main__":
    main()
