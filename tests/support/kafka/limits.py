"""What an administrator does to the topics of a running cluster: lower and raise the largest batch that they take."""

from __future__ import annotations

from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from support.kafka.broker import KafkaBroker


def limit_messages(broker: KafkaBroker, topic: str, most: int) -> None:
    """Set `max.message.bytes` of an existing topic, and wait until the broker knows it."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    entry = ConfigEntry("max.message.bytes", str(most), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(15)
    asked = ConfigResource(ConfigResource.Type.TOPIC, topic)
    while admin.describe_configs([asked])[asked].result(15)["max.message.bytes"].value != str(most):
        pass
