"""A `RuntimeContext` that says while it has a device: a copy of an example imports it instead of Outfitter's.

It uses the device as the contract allows: from its grant until it is given back, or until a getter raises.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Self

from uses import BEAT_S, Use

import outfitter


class RuntimeContext(outfitter.RuntimeContext):
    """The same, for one device of `gpu`. The uses are in the file `uses` of the working directory."""

    _use: Use | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        return self._begin_use()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self._begin_use()

    def _stop(self, reason: str) -> Future[None] | None:
        """Whatever leaves the context comes here first."""
        self._end_use()
        return super()._stop(reason)

    def _begin_use(self) -> Self:
        (info,) = self.get_external_resource_infos("gpu")
        self._turn = threading.Lock()
        self._use = Use("uses", info["id"], name=self.worker)
        threading.Thread(target=self._go_on, daemon=True).start()
        return self

    def _go_on(self) -> None:
        pause = threading.Event()
        while not pause.wait(BEAT_S):
            with self._turn:
                if self._use is None:
                    return
                try:
                    self.get_external_resource_infos("gpu")
                except outfitter.OutfitterError:
                    break
                self._use.beat()
        self._end_use()

    def _end_use(self) -> None:
        if self._use is not None:
            with self._turn:
                use, self._use = self._use, None
                if use is not None:
                    use.end()
