"""Streams and events: copies wait in the queue of a stream until something waits for them."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tests.accelerator.faults import waits
from tests.accelerator.memory import TYPE, devices

lock = threading.RLock()
"""Held while anything runs on a device: threads of the host queue and wait as they like."""

_PRIVATE = 20  # c10::DeviceType::PrivateUse1


class Queue:
    """What a stream has been given and has not done."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._waiting: deque[Callable[[], None]] = deque()
        self.done = 0

    @property
    def position(self) -> int:
        """How much the stream has been given so far."""
        return self.done + len(self._waiting)

    def put(self, work: Callable[[], None]) -> None:
        """Have something done behind all that is in the queue."""
        with lock:
            self._waiting.append(work)

    def run(self, position: int | None = None) -> None:
        """Do what is in the queue, up to a position or all of it."""
        with lock:
            while self._waiting and (position is None or self.done < position):
                self.done += 1
                self._waiting.popleft()()


queues: dict[tuple[int, int], Queue] = {}
"""By device and number of the stream; number 0 is the default stream."""
_numbers = itertools.count(1)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


_thread = _OfThread()


def current_device() -> int:
    """Return the device that this thread uses where none is named."""
    return _thread.device


def set_device(device: Any) -> None:
    """Have this thread use another device."""
    _thread.device = index_of(device)


def index_of(device: Any = None) -> int:
    """Return the index of a device, which may be left out, as a device or by itself.

    Raises:
        RuntimeError: there is no such device.
    """
    if isinstance(device, str | torch.device):
        device = torch.device(device).index
    index = _thread.device if device is None else device
    if not 0 <= index < len(devices):
        raise RuntimeError(f"{TYPE}: invalid device ordinal {index}, there are {len(devices)}")
    return index


class Stream(torch.Stream):
    """A stream of a device: what it is given is done in order, and not before somebody waits for it."""

    def __new__(cls, device: Any = None, priority: int = 0, number: int | None = None) -> Stream:
        index = index_of(device)
        number = next(_numbers) if number is None else number
        queues.setdefault((index, number), Queue(index))
        return super().__new__(cls, stream_id=number, device_index=index, device_type=_PRIVATE)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._before: list[tuple[int, Stream]] = []

    @property
    def queue(self) -> Queue:
        """What it has not done."""
        return queues[self.device_index, self.stream_id]

    def synchronize(self) -> None:
        """Have the host wait for all that the stream was given."""
        waits.synchronized += 1
        self.queue.run()

    def query(self) -> bool:
        """Return whether nothing is left to do."""
        return self.queue.done == self.queue.position

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that comes when all is done that the stream was given until now."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Have what the stream is given from now on wait for an event."""
        self.queue.put(event.reach)

    def wait_stream(self, stream: Stream) -> None:
        """Have what the stream is given from now on wait for all that another one was given until now."""
        self.wait_event(stream.record_event())

    def __enter__(self) -> Stream:
        self._before.append((_thread.device, current_stream(self.device_index)))
        set_stream(self)
        return self

    def __exit__(self, *error: Any) -> None:
        device, stream = self._before.pop()
        set_stream(stream)
        set_device(device)


class Event:
    """A point in the work of a stream."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        self._queue: Queue | None = None
        self._position = 0

    def record(self, stream: Stream | None = None) -> None:
        """Come when all is done that the stream was given until now."""
        self._queue = (stream or current_stream()).queue
        self._position = self._queue.position

    def reach(self) -> None:
        """Have the stream work until the event has come."""
        if self._queue is not None:
            self._queue.run(self._position)

    def wait(self, stream: Stream | None = None) -> None:
        """Have what a stream is given from now on wait for the event."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Have the host wait for the event."""
        waits.synchronized += 1
        self.reach()

    def query(self) -> bool:
        """Return whether the event has come."""
        return self._queue is None or self._queue.done >= self._position


def current_stream(device: Any = None) -> Stream:
    """Return the stream that this thread gives a device's work to."""
    index = index_of(device)
    return _thread.streams.get(index) or Stream(index, number=0)


def set_stream(stream: Stream) -> None:
    """Have this thread give work to a stream, and use its device."""
    _thread.streams[stream.device_index] = stream
    _thread.device = stream.device_index


def synchronize(device: Any = None) -> None:
    """Have the host wait for all streams of a device."""
    waits.synchronized += 1
    index = index_of(device)
    for queue in [queue for queue in queues.values() if queue.device == index]:
        queue.run()
