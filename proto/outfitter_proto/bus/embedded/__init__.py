"""The embedded bus: Kafka's semantics for the processes of one machine, in one SQLite file and without a broker.

It is for one machine and for tests, not a database others may write to and not a broker for a network:
whoever may write the file is trusted, and there are no rights per topic. Its rooms, from the outside in:

- `adapter`: `EmbeddedBus`, the port's face; `reader` and `writer`: the port's cursor and fenced writer
- `membership`, `roster`: groups that share a topic's partitions out among processes, and their tables
- `log`: the tables and every statement on them, as plain functions over a connection
- `housekeeping`: retention and compaction, which a manager calls now and then
- `database`: one connection in one thread, transactions, the verdicts on SQLite's errors
- `thread`, `lock`, `wake`: the thread itself, the queue of writers, how readers hear of a commit
- `place`: where the file is and whether it may be there
"""

from __future__ import annotations

from outfitter_proto.bus.embedded.adapter import EmbeddedBus

__all__ = ["EmbeddedBus"]
