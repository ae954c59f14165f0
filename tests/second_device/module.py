"""The module `torch.second`: streams, events, the current device, memory."""

from types import ModuleType
from typing import Any

import torch


def register(library: Any) -> None:
    torch.utils.rename_privateuse1_backend("second")
    torch._register_device_module("second", _module(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_packed_sequence=True)


class Event:
    """Event that is recorded at once, as everything is in order."""

    def __init__(self, library: Any, *args: Any, **keywords: Any) -> None:
        self._library = library

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._library.second_wait()

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


class Stream:
    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self.device = device

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event(self._library)

    def synchronize(self) -> None:
        self._library.second_wait()

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None: ...


def _module(library: Any) -> ModuleType:
    def index_of(device: Any) -> int:
        index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
        return library.second_current() if index is None else int(index)

    class device:
        def __init__(self, index: Any) -> None:
            self.index = index_of(index)

        def __enter__(self) -> None:
            self.before = library.second_current()
            library.second_set(self.index)

        def __exit__(self, *error: object) -> None:
            library.second_set(self.before)

    stream = Stream(library, torch.device("cpu"))
    host = torch.random.default_generator
    made = ModuleType("torch.second")
    things: dict[str, Any] = {
        "device": device,
        "Stream": lambda *_, **__: Stream(library, torch.device("second", library.second_current())),
        "Event": lambda *_, **__: Event(library),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 2,
        "current_device": lambda: library.second_current(),
        "set_device": lambda device: library.second_set(index_of(device)),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda given: given or stream,
        "synchronize": lambda *_: library.second_wait(),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda *_: True,
        "manual_seed": host.manual_seed,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda *_: host.get_state(),
        "set_rng_state": lambda state, *_: host.set_state(state),
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: _memory(library),
        "memory_allocated": lambda *_: library.second_count(_ALLOCATED),
        "max_memory_allocated": lambda *_: library.second_count(_PEAK),
        "reset_peak_memory_stats": lambda *_: library.second_reset_peak(),
    }
    for name, thing in things.items():
        setattr(made, name, thing)
    return made


_ALLOCATED, _PEAK = 9, 10  # of the counts of second.cpp


def _memory(library: Any) -> tuple[int, int]:
    limit = library.second_limit()
    return limit - library.second_count(_ALLOCATED), limit
