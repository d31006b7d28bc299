"""Whether a GPU is ill, by what NVML says of it now: pure functions over one look and the last Xid.

The levels in this order: it is lost or must be reset; its recovery action; its memory (row remapping, or retired pages
before Ampere); its last Xid. What cannot be asked is unknown, and never healthy. An event alone makes nothing ill.
"""

from __future__ import annotations

from typing import NamedTuple

from outfitter_drivers.nvidia import codes
from outfitter_drivers.nvidia.snapshot import Gpu
from outfitter_drivers.nvidia.xid import XidClasses
from outfitter_proto.records import Health


class Verdict(NamedTuple):
    health: Health
    reason: str | None


HEALTHY = Verdict(Health.HEALTHY, None)

_ILL_BY_CODE = frozenset((codes.GPU_IS_LOST, codes.RESET_REQUIRED))


def of_gpu(gpu: Gpu, last_xid: int | None, classes: XidClasses) -> Verdict:
    """Its health, apart from its MIG mode."""
    if gpu.failure is not None:
        health = Health.UNHEALTHY if gpu.failure in _ILL_BY_CODE else Health.UNKNOWN
        return Verdict(health, f"NVML: {codes.in_words(gpu.failure)}")
    if gpu.recovery_action:
        return _ill(f"NVML's recovery action is {codes.recovery_action(gpu.recovery_action)}")
    if gpu.remapping_failed:
        return _ill("a row of its memory could not be remapped")
    if gpu.remapping_pending:
        return _ill("rows of its memory are remapped at the next reset (remapping pending)")
    if gpu.retired_pages_pending:
        return _ill("pages of its memory are retired at the next reset (retirement pending)")
    if last_xid is not None and classes.is_ill(last_xid, has_levels=gpu.recovery_action is not None):
        return _ill(f"its last Xid is {last_xid}, after which NVIDIA advises a {classes.of(last_xid)}")
    if gpu.unreadable:
        said = ", ".join(f"{name.replace('_', ' ')}: {codes.in_words(code)}" for name, code in gpu.unreadable.items())
        return Verdict(Health.UNKNOWN, f"NVML does not tell its health ({said})")
    return HEALTHY


def of_parts(gpu: Gpu, verdict: Verdict) -> Verdict:
    """The health of a GPU's MIG instances. While another mode is pending, a reset is owed that ends them."""
    if verdict.health is Health.HEALTHY and gpu.mig_pending is not None and gpu.mig_pending != gpu.mig:
        return Verdict(
            Health.UNKNOWN, f"its MIG mode is switched {'on' if gpu.mig_pending else 'off'} at its next reset"
        )
    return verdict


def of_whole(gpu: Gpu, verdict: Verdict) -> Verdict | None:
    """The health of a GPU as a whole, for which its MIG mode counts, too. None: it is well, and only its MIG instances
    are devices."""
    as_parts = of_parts(gpu, verdict)
    if as_parts.health is Health.HEALTHY and gpu.mig:
        return None if gpu.instances else Verdict(Health.UNKNOWN, "it is in MIG mode, and has no MIG instances")
    return as_parts


def _ill(reason: str) -> Verdict:
    return Verdict(Health.UNHEALTHY, reason)
