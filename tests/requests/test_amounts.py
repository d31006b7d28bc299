"""Which key is asked for how much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from outfitter_drivers.api import ExternalResourceDriver, KubernetesRequest, YarnRequest
from outfitter_service.config import ResourceConfig
from outfitter_service.core.model import SpecState
from outfitter_service.requests import RequestError, kubernetes_amounts, yarn_amounts


def resource(name: str = "test", amount: Any = 2, **more: Any) -> ResourceConfig:
    return ResourceConfig(name=name, amount=amount, **more)


class Asked(ExternalResourceDriver, KubernetesRequest, YarnRequest):
    """A driver that names its own keys."""

    def __init__(self, quantity: Any = None, key: str = "driver.io/x") -> None:
        self.quantity = quantity
        self.key = key

    async def retrieve_resource_info(self, amount: int, worker: object) -> Any:
        raise AssertionError("a request looks at no hardware")

    def kubernetes_resources(self, amount: int) -> Mapping[str, str]:
        return {self.key: self.quantity if self.quantity is not None else str(amount * 10)}

    def yarn_resources(self, amount: int) -> Mapping[str, int]:
        return {self.key: self.quantity if self.quantity is not None else amount * 10}


def test_the_amount_is_requested_under_the_configured_key() -> None:
    """Flink's own test: name `test`, amount 2, key `test.com/test`."""
    assert kubernetes_amounts([resource(kubernetes_key="test.com/test")]) == {"test.com/test": "2"}
    assert yarn_amounts([resource(yarn_key="test.com/test")]) == {"test.com/test": 2}


def test_two_resources_on_one_key_make_one_entry() -> None:
    """Flink's own test; here it is the first one's, not whichever comes first in a hash table."""
    two = [
        resource("a", 2, kubernetes_key="x.io/y", yarn_key="y"),
        resource("b", 1, kubernetes_key="x.io/y", yarn_key="y"),
    ]
    assert kubernetes_amounts(two) == {"x.io/y": "2"}
    assert yarn_amounts(two) == {"y": 2}


def test_a_resource_without_a_key_is_left_out() -> None:
    assert kubernetes_amounts([resource(yarn_key="y")]) == {}
    assert yarn_amounts([resource(kubernetes_key="x.io/y")]) == {}


class Ending(Asked):
    """A driver that wants to end the process."""

    def kubernetes_resources(self, amount: int) -> Mapping[str, str]:
        raise SystemExit(0)

    def yarn_resources(self, amount: int) -> Mapping[str, int]:
        raise GeneratorExit


def test_a_driver_that_fails_when_it_is_asked_for_its_keys_is_named() -> None:
    with pytest.raises(RequestError, match="its driver failed: SystemExit: 0"):
        kubernetes_amounts([resource()], lambda _: Ending())
    with pytest.raises(RequestError, match="its driver failed: GeneratorExit"):
        yarn_amounts([resource()], lambda _: Ending())


def test_a_resource_without_a_driver_is_requested_all_the_same() -> None:
    assert yarn_amounts([resource(yarn_key="y", state=SpecState.NO_DRIVER)]) == {"y": 2}


@pytest.mark.parametrize("state", [SpecState.DISABLED, SpecState.MISCONFIGURED])
def test_a_resource_that_is_not_in_effect_is_not_requested(state: SpecState) -> None:
    assert kubernetes_amounts([resource(kubernetes_key="x.io/y", state=state)]) == {}


def test_a_driver_is_asked_where_no_key_is_configured() -> None:
    assert kubernetes_amounts([resource()], lambda _: Asked()) == {"driver.io/x": "20"}
    assert yarn_amounts([resource()], lambda _: Asked()) == {"driver.io/x": 20}


def test_a_configured_key_wins_over_the_drivers() -> None:
    both = [resource(kubernetes_key="x.io/y", yarn_key="y")]
    assert kubernetes_amounts(both, lambda _: Asked()) == {"x.io/y": "2"}
    assert yarn_amounts(both, lambda _: Asked()) == {"y": 2}


@pytest.mark.parametrize("quantity", ["0.5", "500m", "1k", "0", "-1", "", "²", 0.5, 0, True, None])
def test_fractions_and_other_non_numbers_are_refused(quantity: Any) -> None:
    """Flink would make "0" of 0.5, and nobody would know."""
    with pytest.raises(RequestError, match=r"resource test: .* whole numbers"):
        kubernetes_amounts([resource(amount=quantity, kubernetes_key="x.io/y")])
    if quantity is not None:
        with pytest.raises(RequestError, match="whole numbers"):
            kubernetes_amounts([resource()], lambda _: Asked(quantity))
        with pytest.raises(RequestError, match="whole numbers"):
            yarn_amounts([resource()], lambda _: Asked(quantity))


def test_a_key_that_a_driver_names_is_checked_too() -> None:
    with pytest.raises(RequestError, match="'gpu' is no name of a Kubernetes extended resource"):
        kubernetes_amounts([resource()], lambda _: Asked(key="gpu"))
    with pytest.raises(RequestError, match="blank"):
        yarn_amounts([resource()], lambda _: Asked(key=" "))


def test_yarns_maximum_is_allowed_and_one_more_is_refused_with_both_numbers() -> None:
    """Flink's own test, with words instead of an IllegalStateException."""
    assert yarn_amounts([resource(yarn_key="y")], maximum={"y": 2}) == {"y": 2}
    with pytest.raises(RequestError, match=r"test: 3 of y requested, the cluster allows at most 2"):
        yarn_amounts([resource(amount=3, yarn_key="y")], maximum={"y": 2})


def test_a_type_that_the_cluster_does_not_know_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        RequestError, match=r"2 of y requested, which the cluster does not know; it knows x \(at most 4\)"
    ):
        yarn_amounts([resource(yarn_key="y")], maximum={"x": 4})
