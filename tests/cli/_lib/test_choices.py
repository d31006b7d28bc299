"""`--where` and `--same` say which devices, and what is wrong with them."""

from __future__ import annotations

import click
import pytest

from outfitter_proto.records import Condition, ResourceRequest
from outfitter_service.cli._lib.choices import chosen

ONE = {"gpu": ResourceRequest(amount=1)}


@pytest.mark.parametrize(
    ("where", "conditions"),
    [
        (["gpu:model=A100"], {"model": Condition(is_="A100")}),
        (["gpu:model=A100,*H200*"], {"model": Condition(is_=("A100", "*H200*"))}),
        (["gpu:model~H100"], {"model": Condition(is_="*H100*")}),
        (["gpu:model!=A100"], {"model": Condition(not_="A100")}),
        (["gpu:model!~PCIe,MIG"], {"model": Condition(not_=("*PCIe*", "*MIG*"))}),
        (["gpu:memory.total_bytes=40Gi.."], {"memory.total_bytes": Condition(min="40Gi")}),
        (["gpu:memory.total_bytes=..80Gi"], {"memory.total_bytes": Condition(max="80Gi")}),
        (["gpu:memory.total_bytes=40Gi..80Gi"], {"memory.total_bytes": Condition(min="40Gi", max="80Gi")}),
        (["gpu:compute_capability=8.9.."], {"compute_capability": Condition(min="8.9")}),
        (["gpu:pci.bus_id=0000:3b:00.0"], {"pci.bus_id": Condition(is_="0000:3b:00.0")}),
        (["gpu:model~H100", "gpu:model!~PCIe"], {"model": Condition(is_="*H100*", not_="*PCIe*")}),
        (["gpu:a=1", "gpu:b=2"], {"a": Condition(is_="1"), "b": Condition(is_="2")}),
    ],
)
def test_a_clause_is_read(where: list[str], conditions: dict[str, Condition]) -> None:
    assert chosen(ONE, where, []) == {"gpu": ResourceRequest(amount=1, where=conditions)}


def test_properties_in_common_are_read() -> None:
    assert chosen(ONE, [], ["gpu:nvlink.group,numa_node", "gpu:x"]) == {
        "gpu": ResourceRequest(amount=1, same=("nvlink.group", "numa_node", "x"))
    }


def test_without_clauses_nothing_is_said() -> None:
    assert chosen(ONE, [], []) == ONE


@pytest.mark.parametrize(
    ("where", "same", "words"),
    [
        (["gpu:memory"], [], "'gpu:memory' is not NAME:PROPERTY=VALUE: write"),
        (["gpu:memory"], [], "the shell takes > and < for itself"),
        (["gpu:memory>=40Gi"], [], "the shell takes > and < for itself"),
        (["model=A100"], [], "'model=A100' is not NAME:PROPERTY=VALUE"),
        (["gpu:memory=.."], [], "has neither a minimum nor a maximum"),
        (["gpu:memory!=40Gi.."], [], "excludes a range; say what is wanted instead, such as gpu:memory=..40Gi"),
        (["gpu:memory=lots.."], [], "gpu: where.memory.min is 'lots', which is no number"),
        (["gpu:m=1", "gpu:m=2"], [], "'gpu:m=2' is about what another --where has said"),
        (["fpga:m=1"], [], "fpga needs its amount: --resource fpga=1"),
        ([], ["fpga:m"], "fpga needs its amount: --resource fpga=1"),
        ([], ["gpu"], "'gpu' is not NAME:PROPERTY"),
        ([], ["gpu:a,,b"], "'gpu:a,,b' is not NAME:PROPERTY"),
        ([], ["gpu:a,b,c,d,e"], "gpu: same names 5 properties; at most 4 are compared"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_valid(where: list[str], same: list[str], words: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        chosen(ONE, where, same)
    assert words in caught.value.message
