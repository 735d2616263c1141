"""How weights get to engine processes: on the device where that can be (`device_weights.py`), and else through host
memory (`shared_weights.py`).

    UpdateWeightsOnDevice --> Changed | Error       that is all
                          --> Unreachable           UpdateWeights --> Changed | Error
"""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from jpaged.api.weights import InFlight, flat_weights
from jpaged.host.device_memory import MemoryNotSharedError
from jpaged.processes import wire
from jpaged.processes.device_weights import DeviceWeights
from jpaged.processes.shared_weights import SharedWeights

log = logging.getLogger("jpaged.engine")


class WeightDelivery:
    """The arrays of one call of `update_weights`, and their ways.

    weights, partial, in_flight: as of `LLMEngine.update_weights`, a mapping.
    keep: make a copy in host memory even where the weights go on the device, for `take_copy`.

    Attributes:
        names: of the arrays.
        seconds: of each part so far: "copy" to host memory; "ready" and "export" of `DeviceWeights`; and "open",
            "write" and "close" of the slowest engine process.

    Raises:
        InvalidParameterError: as `flat_weights` and `SharedWeights`.
    """

    def __init__(self, weights: Mapping[Any, Any], partial: bool, in_flight: InFlight, keep: bool) -> None:
        self._weights = flat_weights(weights)
        self._partial, self._in_flight = partial, in_flight
        self._on_device: DeviceWeights | None = None
        self.names = frozenset(self._weights)
        self._shared: SharedWeights | None = None
        self.seconds: dict[str, float] = {}
        if keep:
            self._share()
        try:
            self._on_device = DeviceWeights(self._weights)
            self.seconds |= self._on_device.seconds
        except MemoryNotSharedError as error:
            log.info("weights go through host memory: %s", error)

    def first(self) -> wire.UpdateWeights | wire.UpdateWeightsOnDevice:
        """The question for every engine process."""
        if self._on_device is None:
            return self._through_host()
        found = self._on_device
        return wire.UpdateWeightsOnDevice(
            found.address, found.allocations, found.arrays, self._partial, self._in_flight
        )

    def again(self, unreachable: wire.Unreachable) -> wire.UpdateWeights:
        """The question for engine processes that have answered `Unreachable`."""
        log.info("weights go through host memory: an engine process cannot have them: %s", unreachable.reason)
        return self._through_host()

    def count(self, answers: Iterable[wire.Reply | wire.Error | None]) -> None:
        """Adds the seconds of the engine processes to `seconds`."""
        for answer in answers:
            if isinstance(answer, wire.Changed):
                for part, seconds in answer.seconds.items():
                    self.seconds[part] = max(self.seconds.get(part, 0.0), seconds)

    def take_copy(self) -> SharedWeights:
        """The copy in host memory, which is the caller's from here on."""
        copy = self._share()
        self._shared = None
        return copy

    def close(self) -> None:
        """Lets go of the arrays, and of the copy if nobody has taken it. No engine process reads them any more."""
        if self._on_device is not None:
            self._on_device.close()
        if self._shared is not None:
            self._shared.close()

    def _through_host(self) -> wire.UpdateWeights:
        shared = self._share()
        return wire.UpdateWeights(shared.path, shared.arrays, self._partial, self._in_flight)

    def _share(self) -> SharedWeights:
        if self._shared is None:
            begun = time.perf_counter()
            self._shared = SharedWeights(self._weights)
            self.seconds["copy"] = time.perf_counter() - begun
        return self._shared
