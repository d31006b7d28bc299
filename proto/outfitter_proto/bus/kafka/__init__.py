"""The bus on Kafka, through aiokafka; the only package that imports it.

How it is built, and why:

- Reading, publishing and asking use aiokafka's connections and wire formats, with a fetch loop of our own (`cluster`,
  `reader`, `batches`). aiokafka's consumer retries for ever in silence when a cluster is away, and dies on a compacted
  topic (see `repair`); a loop that asks once and looks at the answer has an error to raise for each of those.
- Writing in transactions uses aiokafka's producer (`producer`, `writer`), which keeps the sequence numbers and the
  protocol of transactions, with the repairs that it needs on a subclass.
- All connections, those of aiokafka's own clients included, come from one place (`connection`) that reads the secrets
  anew (`access`), hears every refusal and says why (`diagnosis`); `authorization` names the rights that are missing.
- Sharing partitions out among processes uses aiokafka's group coordinator without a consumer (`coordination`,
  `membership`): it only says who owns which, so nothing that is read or written can hold it up.

Nothing here changes anything global in aiokafka: a worker's process may use aiokafka for its own purposes.
"""

from outfitter_proto.bus.kafka.adapter import KafkaBus
from outfitter_proto.bus.kafka.reading.user_consumer_fix import bear_emptied_control_batches

__all__ = ["KafkaBus", "bear_emptied_control_batches"]
