"""The bus on Kafka, through aiokafka. No other package imports aiokafka.

The parts, and the reasons for them:

- Reading and publishing use aiokafka's connections and wire formats with our own fetch loop (`cluster`, `reader`,
  `batches`). aiokafka's consumer retries silently for ever when a cluster is away, and fails on a compacted topic (see
  `user_consumer_fix`). Our loop sends one request and raises an error for each of these cases.
- Transactions use aiokafka's producer (`producer`, `writer`), which handles sequence numbers and the protocol. A
  subclass has the workarounds that we need.
- All connections, also those of aiokafka's clients, come from `connection`. It reads the secrets each time (`login`),
  notices every refusal and explains it (`diagnosis`). `authorization` names missing rights.
- Groups use aiokafka's group coordinator without a consumer (`coordination`, `membership`), so that reads and writes
  cannot delay it.

Nothing here changes global state of aiokafka, because a worker's process may use aiokafka itself.
"""

from outfitter_proto.bus.kafka.adapter import KafkaBus
from outfitter_proto.bus.kafka.reading.user_consumer_fix import bear_emptied_control_batches

__all__ = ["KafkaBus", "bear_emptied_control_batches"]
