"""All integrations in all crashes: of single processes, in other languages, on real clusters."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.kafka.broker import Broker
from wild.clusters import FLINK_PLUGINS, PYFLINK_PROCESS, PYFLINK_THREAD, SPARK, SPARK_LEASE
from wild.integrations import ASYNCIO, CELERY, CONTEXT, DASK, FASTSTREAM, FAUST, HOLD, LEASE, RUN
from wild.languages import LANGUAGES
from wild.scene import CRASHES, Integration, Note, play

pytestmark = [pytest.mark.wild, pytest.mark.kafka, pytest.mark.timeout(1200)]

PROCESSES = (RUN, HOLD, LEASE, CONTEXT, ASYNCIO, FASTSTREAM, FAUST, CELERY, DASK)
CLUSTERS = (SPARK, SPARK_LEASE, PYFLINK_PROCESS, PYFLINK_THREAD, *FLINK_PLUGINS)


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("integration", [*PROCESSES, *LANGUAGES, *CLUSTERS], ids=lambda integration: integration.name)
def test_no_device_has_two_living_users_and_the_next_in_line_gets_what_is_free(
    integration: Integration, crash: str, wild_broker: Broker, tmp_path: Path, note: Note
) -> None:
    play(integration, crash, tmp_path, note, wild_broker)
