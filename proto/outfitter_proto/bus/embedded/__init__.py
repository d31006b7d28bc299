"""The embedded bus: Kafka's semantics for the processes of one machine, in one SQLite file and without a broker.

It is for one machine and for tests, not for a network: it trusts every user that may write the file, and has no rights
per topic. Its modules, from the outside in:

- `adapter`: `EmbeddedBus`, the port; `reader` and `writer`: the port's cursor and fenced writer
- `membership`: the one member that a group has
- `log`: the tables and every statement on them, as plain functions over a connection
- `housekeeping`: retention and compaction, which a manager calls regularly
- `database`: one connection in one thread, transactions, and the bus error for each error of SQLite
- `thread`, `lock`, `notify`: the thread itself, the queue of writers and the place of a member, the wake-up of readers
- `location`: where the file is and whether it may be there
"""

from __future__ import annotations

from outfitter_proto.bus.embedded.adapter import EmbeddedBus

__all__ = ["EmbeddedBus"]
