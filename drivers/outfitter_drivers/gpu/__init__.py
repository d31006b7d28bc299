"""The `gpu` driver: Flink's GPU plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outfitter_drivers.gpu.factory import GPUDriverFactory

__all__ = ["GPUDriverFactory"]

if not TYPE_CHECKING:

    def __getattr__(name):
        if name == "GPUDriverFactory":
            from outfitter_drivers.gpu.factory import GPUDriverFactory

            return GPUDriverFactory
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
