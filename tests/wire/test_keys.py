"""Keys: what is made of names is told again from the key, and a key that is no one's is told as nobody's."""

from __future__ import annotations

import pytest

from outfitter_proto import keys


def test_an_allocations_key_tells_its_names() -> None:
    key = keys.allocation_key("h", "w", "1")
    assert key == "h/w/1"
    assert keys.allocation_names(key) == ("h", "w", "1")
    assert keys.is_allocation_key(key)
    assert not keys.is_allocation_key(keys.host_key("h"))


@pytest.mark.parametrize(
    "key", [keys.allocation_key("h", "w", "1"), keys.host_key("h"), keys.device_key("h", "GPU-0/1 @"), "h/"]
)
def test_a_key_tells_the_host_that_it_is_about(key: str) -> None:
    assert keys.host_of(key.encode()) == "h"
    assert (key == keys.host_key("h")) or key.encode().startswith(keys.prefixes_of("h"))
    assert not key.encode().startswith(keys.prefixes_of("hh"))


@pytest.mark.parametrize("key", [b"", b"h", b"@host", b"@later/h", b"@checkpoint/host/h"])
def test_a_key_that_is_about_no_host_tells_none(key: bytes) -> None:
    assert keys.host_of(key) is None


def test_a_devices_id_may_have_any_characters() -> None:
    assert keys.device_key("h", "a/b c") == "@device/h/a%2Fb%20c"


@pytest.mark.parametrize(
    ("writer", "kind", "name", "host"),
    [
        (keys.host_writer("h"), "host", "h", "h"),
        (keys.partition_writer(3), "partition", "3", None),
        (keys.sweeper_writer(3), "sweeper", "3", None),
    ],
)
def test_a_checkpoints_key_tells_its_writer(writer: keys.Writer, kind: str, name: str, host: str | None) -> None:
    key = keys.checkpoint_key(writer)
    assert keys.writer_of(key.encode()) == writer
    assert keys.writer_names(writer) == (kind, name)
    assert keys.writer_names(writer).host == host
    assert keys.is_sweeper(writer) == (kind == "sweeper")
    assert keys.writer_of(keys.host_key("h").encode()) is None
