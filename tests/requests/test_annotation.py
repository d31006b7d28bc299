"""What a pod asks for by its annotation becomes requests, or is refused with the words of `config check`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_service.config import ConfigurationError, ResourceConfig, inspect
from outfitter_service.requests import annotated_amounts
from outfitter_service.requests.annotation import MOST_CHARACTERS, MOST_PROBLEMS
from support.processes.command_line import outfitter
from support.webhook import CONFIG


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> tuple[ResourceConfig, ...]:
    file = tmp_path_factory.mktemp("annotation") / "outfitter.toml"
    file.write_text(CONFIG)
    return inspect(file, {}, {}).resources


@pytest.mark.parametrize(
    ("text", "amounts"),
    [
        ("gpu", {"nvidia.com/gpu": "1"}),
        (" gpu = 2 ", {"nvidia.com/gpu": "2"}),
        ("gpu;fpga", {"nvidia.com/gpu": "1", "intel.com/fpga": "3"}),
        ("fpga=1; gpu;", {"intel.com/fpga": "1", "nvidia.com/gpu": "1"}),
        ("gpu=0;fpga", {"nvidia.com/gpu": "0", "intel.com/fpga": "3"}),
        ("gpu=0", {"nvidia.com/gpu": "0"}),
        ("none", {"nvidia.com/gpu": "0", "intel.com/fpga": "0"}),
    ],
)
def test_each_resource_is_requested_with_the_configured_amount_or_its_own(
    resources: tuple[ResourceConfig, ...], text: str, amounts: dict[str, str]
) -> None:
    assert annotated_amounts(text, resources) == amounts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpuu", "gpuu: is no configured resource; configured are gpu, fpga, dongle, off; did you mean gpu?"),
        ("gpu=two", "gpu: must be a whole number from 1 to 9223372036854775807, or 0 to switch the resource off"),
        ("gpu=two", "(found 'two')"),
        ("gpu=", "gpu: is empty; it must be a whole number"),
        ("gpu=-1", "gpu: must be a whole number"),
        ("gpu=0.5", "gpu: must be a whole number"),
        ("gpu,fpga", "item 1 of the list: resource 'gpu,fpga' is not a valid name"),
        ("gpu,fpga", "did you mean ;? gpu;fpga"),
        ("gpu;;fpga", "item 2 of the list is blank; every item must name a resource"),
        ("gpu;none", "item 2 of the list is 'none', which means an empty list"),
        ("gpu;gpu=2", "gpu: is given twice; keep one of them"),
        ("dongle", "dongle: has no name in Kubernetes: external-resource.dongle.kubernetes.config-key is not given"),
        ("off", "off: cannot be requested: switched off on this host: external-resource.off.amount is 0"),
        ("off=2", "off: cannot be requested: switched off"),
        ("  ", "is empty; name resources, such as gpu or gpu=2;fpga, or write none"),
        ("x" * (MOST_CHARACTERS + 1), f"has {MOST_CHARACTERS + 1} characters; at most {MOST_CHARACTERS} are read"),
    ],
)  # fmt: skip
def test_a_wrong_annotation_is_refused_with_what_would_be_valid(
    resources: tuple[ResourceConfig, ...], text: str, words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        annotated_amounts(text, resources)
    assert words in str(caught.value)
    assert all(line.startswith("error: annotation outfitter.dev/resources: ") for line in str(caught.value).split("\n"))


def test_all_problems_are_reported_at_once_and_only_so_many_listed(resources: tuple[ResourceConfig, ...]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        annotated_amounts("gpu=x;nope;off", resources)
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigurationError, match="and 92 more problems") as caught:
        annotated_amounts(";".join(f"n{number}" for number in range(100)), resources)
    assert len(caught.value.problems) == MOST_PROBLEMS + 1


def test_the_words_for_a_wrong_amount_are_those_of_config_check(
    resources: tuple[ResourceConfig, ...], tmp_path: Path
) -> None:
    (tmp_path / "outfitter.toml").write_text(CONFIG.replace("amount = 3", 'amount = "many"'))
    checked = outfitter("config", "check", "outfitter.toml", cwd=tmp_path).stdout
    with pytest.raises(ConfigurationError) as caught:
        annotated_amounts("fpga=many", resources)
    assert str(caught.value).rpartition("fpga: ")[2] in checked


@given(st.text() | st.text(alphabet="gpu fa=;0123456789.,-\x00é"))
def test_any_text_gives_amounts_or_problems(resources: tuple[ResourceConfig, ...], text: str) -> None:
    try:
        amounts = annotated_amounts(text, resources)
    except ConfigurationError:
        return
    assert amounts.keys() <= {"nvidia.com/gpu", "intel.com/fpga"}
    assert all(int(amount) >= 0 for amount in amounts.values())
