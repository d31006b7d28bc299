"""Which brokers the tests have, by the environment: `KAFKA` is 3.9 or 4.3 (the default). With `TRANSACTIONS=1` the
transactions of 4.3 are of version 1, too."""

from __future__ import annotations

import os

from support.kafka.broker import NEW, OLD, VERSION_1

KAFKA = {"3.9": OLD, "4.3": NEW}[os.environ.get("KAFKA", "4.3")]
OPTIONS = VERSION_1 if os.environ.get("TRANSACTIONS") == "1" else ()
ADDS_PARTITIONS = KAFKA == OLD or OPTIONS == VERSION_1
"""Their transactions are of version 1, in which partitions are added by a request of its own."""
