"""A workaround for users' aiokafka consumers. Our own readers do not need it (see `reader`).

The log cleaner keeps an emptied control batch while it is its producer's last batch, for instance the abort marker of
an expired transaction. aiokafka's consumer with `isolation_level="read_committed"` fails there for ever: every poll of
the partition raises `KafkaError: Control batch did not contain any records`. With Kafka's default settings this takes
a day to appear (delete.retention.ms). Kafka's own client ignores emptied control batches.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

_CONTROL = "_contains_abort_marker"


def bear_emptied_control_batches(consumer: Any) -> None:
    """Make this started `AIOKafkaConsumer` skip emptied control batches. Repeatable.

    Call it after `await consumer.start()`. Nothing else in the process changes.

    Raises:
        RuntimeError: the consumer was not started, or this version of aiokafka has a different structure.
    """
    fetcher = getattr(consumer, "_fetcher", None)
    if fetcher is None:
        raise RuntimeError("start the consumer before bear_emptied_control_batches(consumer)")
    if isinstance(fetcher._records, _BearingRecords):
        return
    if type(fetcher._records) is not OrderedDict:
        raise RuntimeError(
            "this version of aiokafka keeps fetched records in another way: is the workaround still needed?"
        )
    bearing = _BearingRecords()
    for partition, result in fetcher._records.items():
        bearing[partition] = result
    fetcher._records = bearing


class _BearingRecords(OrderedDict[Any, Any]):
    """A fetcher's store of fetched records, which applies the workaround to each result before its use."""

    def __setitem__(self, partition: Any, result: Any) -> None:
        records = getattr(result, "_partition_records", None)
        if records is not None:
            contains_abort_marker = getattr(records, _CONTROL)
            setattr(records, _CONTROL, lambda batch: _ends_in_abort(batch, contains_abort_marker))
        super().__setitem__(partition, result)


def _ends_in_abort(batch: Any, contains_abort_marker: Any) -> bool:
    from aiokafka.errors import KafkaError

    try:
        return bool(contains_abort_marker(batch))
    except KafkaError:
        return False  # emptied: neither a commit nor an abort
