"""All checks of `outfitter doctor`, in the order of their findings."""

from __future__ import annotations

from outfitter_service.cli._lib.diagnosis.bus import brokers, ledger, managers, rights, topics
from outfitter_service.cli._lib.diagnosis.finding import Check
from outfitter_service.cli._lib.diagnosis.machine import address, clock, descriptors, pidfd, processes
from outfitter_service.cli._lib.diagnosis.setup import configuration, devices, drivers, secrets

CHECKS: tuple[Check, ...] = (
    configuration,
    secrets,
    drivers,
    devices,
    brokers,
    topics,
    rights,
    managers,
    ledger,
    address,
    descriptors,
    pidfd,
    processes,
    clock,
)
