"""What an administrator does to the topics of a running cluster: lower and raise the largest batch that they take."""

from __future__ import annotations

import time

from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from support.kafka.broker import KafkaBroker


def limit_messages(broker: KafkaBroker, topic: str, most: int) -> None:
    """Set `max.message.bytes` of an existing topic, and wait until the broker goes by it.

    A broker shows a setting a moment before its logs go by it. It takes changes one after the other: once it shows a
    later one, the earlier one is in effect."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    later = 60_000 + time.monotonic_ns() % 1_000_000_000
    for name, value in (("max.message.bytes", most), ("file.delete.delay.ms", later)):
        entry = ConfigEntry(name, str(value), incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
        admin.incremental_alter_configs([resource])[resource].result(15)
        asked = ConfigResource(ConfigResource.Type.TOPIC, topic)
        while admin.describe_configs([asked])[asked].result(15)[name].value != str(value):
            pass
