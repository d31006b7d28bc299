"""A real API server for the tests of the manifests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.kube import Cluster, running


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One API server for all tests, with nothing of ours in it at first."""
    with running(tmp_path_factory.mktemp("kube")) as cluster:
        yield cluster
