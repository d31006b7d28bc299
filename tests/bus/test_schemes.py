"""The one table of bus URLs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outfitter_proto import bus
from outfitter_proto.bus import schemes

URLS = {"kafka://one:9092,[::1]": False, "sqlite:///var/bus.db": True}


@pytest.mark.parametrize("url", URLS)
def test_each_url_is_checked_by_its_row(url: str) -> None:
    scheme = schemes.find(url)
    assert scheme is not None
    scheme.check(url)
    assert (scheme.is_local, schemes.is_local(url)) == (URLS[url], URLS[url])


@pytest.mark.parametrize("url", ["kafka://", "kafka://one:port", "sqlite:bus.db", "sqlite://host/bus.db"])
def test_what_is_wrong_with_a_url_shows_without_its_adapter(url: str) -> None:
    scheme = schemes.find(url)
    assert scheme is not None
    with pytest.raises(ValueError, match="write kafka://"):
        scheme.check(url)


def test_a_url_of_another_kind_is_no_bus() -> None:
    assert (schemes.find("amqp://x"), schemes.is_local("amqp://x")) == (None, False)
    with pytest.raises(bus.BusConfigurationError, match="'amqp://x' is no bus URL: write kafka://"):
        bus.connect("amqp://x")


@pytest.mark.parametrize(("url", "other"), [("kafka://one", "embedded"), ("sqlite:///var/bus.db", "kafka")])
def test_connecting_imports_no_other_adapter(url: str, other: str) -> None:
    program = f"import sys; from outfitter_proto.bus import connect; connect({url!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert not any(module.startswith(f"outfitter_proto.bus.{other}") for module in done.stdout.split())
