"""Names, topics and partitions: what two programs must spell alike to meet."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outfitter_proto import keys, names
from outfitter_proto.partitioning import murmur2, partition_of

JAVA = {
    # expected values of Kafka's own UtilsTest.testMurmur2, signed as Java prints them
    "21": -973_932_308,
    "foobar": -790_332_482,
    "a-little-bit-long-string": -985_981_536,
    "a-little-bit-longer-string": -1_486_304_829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58_897_971,
    "abc": 479_470_107,
}


@pytest.mark.parametrize("text", JAVA)
def test_the_hash_is_that_of_javas_clients(text: str) -> None:
    assert murmur2(text.encode()) == JAVA[text] % 2**32
    assert partition_of(text, 7) == (JAVA[text] & 0x7FFFFFFF) % 7


@pytest.mark.parametrize("name", ["a", "0", "gpu-3.example.org", "A_b", "a" * 253])
def test_a_name_is_accepted(name: str) -> None:
    assert names.check_name(name, "host") == name


@pytest.mark.parametrize("name", ["", " a", "a b", "a/b", "@a", ".a", "-a", "_a", "a" * 254, "a\n", "ä", "a\0"])
def test_what_is_no_name_is_refused_by_its_kind(name: str) -> None:
    with pytest.raises(names.InvalidNameError, match="worker"):
        names.check_name(name, "worker")


def test_a_cluster_prefixes_its_topics_and_transactional_ids() -> None:
    assert names.topics("prod") == ("prod.registrations", "prod.allocations", "prod.history", "prod.dead-letters")
    assert names.transactional_id("prod", keys.host_writer("gpu-3")) == "prod-host-gpu-3"


PARTS = st.lists(st.sampled_from(["a", "host", "partition", "1", "-", "x"]), max_size=5).map("-".join)
NAMES = PARTS.map(lambda rest: f"a{rest}"[:253])
WRITERS = st.one_of(NAMES.map(keys.host_writer), st.integers(0, 11).map(keys.partition_writer))


@given(st.lists(st.tuples(NAMES, WRITERS), min_size=2, max_size=30, unique=True))
@example([("a", "host/b-host-c"), ("a-host-b", "host/c")])
@example([("a", "host/host-x"), ("a-host", "host/x")])
@example([("a", "host/b-partition-1"), ("a-host-b", "partition/1")])
def test_no_two_writers_share_a_transactional_id_whatever_their_clusters_are_called(
    writers: list[tuple[str, str]],
) -> None:
    """They would fence each other for ever."""
    assert len({names.transactional_id(cluster, writer) for cluster, writer in writers}) == len(writers)


def test_a_cluster_that_is_no_name_has_no_topics() -> None:
    with pytest.raises(names.InvalidNameError, match="cluster"):
        names.topics("pr od")
