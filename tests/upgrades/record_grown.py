"""Records in `grown/` what version 0.2 has added partitions to: wholly, half, and a backup from before it began.

Run it once, with that version's Python, as root in `unshare -m` and with an empty /etc/machine-id bound over the real
one, so that no machine-id is recorded:

    /path/to/venv-of-0.2/bin/python tests/upgrades/record_grown.py
"""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio

from outfitter_proto.bus import Entry, connect
from outfitter_proto.codec import encode
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Deregister, Register, Registration

HOSTS = ("h1", "h0")
GROWN = Path(__file__).parent / "grown"
OUTFITTER = Path(sys.executable).parent / "outfitter"


def outfitter(bus: Path, host: str, *arguments: str) -> None:
    environment = {**os.environ, "OUTFITTER_BUS": f"sqlite://{bus}", "OUTFITTER_HOST": host}
    subprocess.run([OUTFITTER, *arguments], env=environment, check=False)


def lend(folder: Path, bus: Path, host: str) -> None:
    """One worker has the device, and two messages of another one come when the manager has stopped."""
    environment = {**os.environ, "OUTFITTER_BUS": f"sqlite://{bus}", "OUTFITTER_HOST": host}
    command = [OUTFITTER, "serve", "--config", folder / "outfitter.toml", "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, env=environment) as manager:
        anyio.run(say, bus, Register(host=host, worker="w1", incarnation="1", lease_s=None))
        status = [OUTFITTER, "status", "--json"]
        while subprocess.check_output(status, env=environment).count(b'"allocated"') <= HOSTS.index(host):
            pass
        manager.send_signal(signal.SIGTERM)
    anyio.run(say, bus, Register(host=host, worker="w3", incarnation="1", lease_s=None))
    anyio.run(say, bus, Deregister(host=host, worker="w3", incarnation="1"))


async def say(bus: Path, message: Registration) -> None:
    """Publish a message of a worker without an owner process, which outlives this recording."""
    async with connect(f"sqlite://{bus}") as opened:
        entry = Entry(message.host.encode(), encode(message))
        await opened.publish(topics("outfitter").registrations, partition_of(message.host, 2), entry)


async def grow_half(bus: Path) -> None:
    """Add partitions, and stop when the records are copied and not deleted yet."""
    from outfitter_service.runtime.changelog.growth.grow import grow  # type: ignore[import-not-found]

    def say(line: str) -> None:
        if "copied" in line:
            raise StopAsyncIteration

    async with connect(f"sqlite://{bus}") as opened:
        try:
            await grow(opened, "outfitter", 3, say=say)
        except StopAsyncIteration:
            return


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    bus, half = folder / "bus" / "bus.db", folder / "half" / "bus.db"
    bus.parent.mkdir(mode=0o700)
    (folder / "gpus").mkdir()
    (folder / "gpus" / "gpu0").write_text("id=GPU-0\n")
    (folder / "outfitter.toml").write_text(
        'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\n'
        f'driver = "files"\nparam.path = "{folder}/gpus"\n'
    )
    outfitter(bus, HOSTS[0], "topics", "create", "--partitions", "2")
    for host in HOSTS:
        lend(folder, bus, host)
    GROWN.mkdir(exist_ok=True)
    outfitter(bus, HOSTS[0], "backup", "--out", str(GROWN / "0.2.0-backup.gz"))
    shutil.copytree(bus.parent, half.parent)
    outfitter(bus, HOSTS[0], "topics", "grow", "--partitions", "3")
    anyio.run(grow_half, half)
    for file, name in ((bus, "grown"), (half, "half-moved")):
        (GROWN / f"0.2.0-{name}.db.gz").write_bytes(gzip.compress(file.read_bytes()))


if __name__ == "__main__":
    main()
