"""What a script names must be GPUs: no words of a message, and each GPU once."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_drivers.api import DriverParams, ExternalResourceDriver, TemporaryDriverError, Worker
from outfitter_drivers.gpu.factory import GPUDriverFactory
from outfitter_drivers.gpu.names import gpu_names
from support.drivers.gpu_machine import executable

WORKER = Worker(host="h", resource="gpu", worker="w", incarnation="1")
A, B = "GPU-aaaaaaaa-1111-2222-3333-444444444444", "GPU-bbbbbbbb-1111-2222-3333-444444444444"


def driver(folder: Path, printed: str, contract: str) -> ExternalResourceDriver:
    script = executable(folder / "script", f"cat <<'EOF'\n{printed}\nEOF")
    params = {"discovery-script.path": str(script)} | ({"discovery-script.contract": contract} if contract else {})
    return GPUDriverFactory().create_external_resource_driver(DriverParams(params))


async def named(folder: Path, printed: str, contract: str = "") -> list[str]:
    infos = await driver(folder, printed, contract).retrieve_resource_info(1, WORKER)
    return [info["index"] for info in infos]


@pytest.mark.parametrize("contract", ["", "allocate-release"])
@pytest.mark.parametrize(
    ("printed", "names"),
    [
        ("0,00", ["0"]),
        ("00,01,2", ["0", "1", "2"]),
        ('{"name": "gpu", "addresses": ["0", "000", 1]}', ["0", "1"]),
        (f"{A},{A.upper()},{A.lower()}", [A]),
        (f"{A.upper()},{B}", [A, B]),
        ("MIG-GPU-8a56/1/1,MIG-GPU-8a56/1/10", ["MIG-GPU-8a56/1/1", "MIG-GPU-8a56/1/10"]),
        ("GPU-8a56,MIG-8a57", ["GPU-8a56", "MIG-8a57"]),
        ("/dev/davinci0,/dev/davinci1", ["/dev/davinci0", "/dev/davinci1"]),
        ("00000000:01:00.0,00000000:02:00.0", ["00000000:01:00.0", "00000000:02:00.0"]),
        ("vendor.com/gpu=0,card_1@node", ["vendor.com/gpu=0", "card_1@node"]),
        ("0;1", ["0;1"]),
    ],
)
async def test_each_gpu_has_one_name(tmp_path: Path, printed: str, names: list[str], contract: str) -> None:
    assert await named(tmp_path, printed, contract) == names


@pytest.mark.parametrize("contract", ["", "allocate-release"])
@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("GPU-8a56,GPU-8A56", ["'GPU-8a56'", "'GPU-8A56'"]),
        ("GPU-8a56f3,GPU-9b,GPU-8a", ["'GPU-8a'", "'GPU-8a56f3'"]),
        (f"{A},{A.upper()[:12]}", [f"'{A}'", "'GPU-AAAAAAAA'"]),
        (f"0,{A}", ["'0' (an index)", f"'{A}' (a UUID)"]),
        ("Found,2,GPUs", ["'Found'"]),
        ("GPU0,2", ["'GPU0' (another name)", "'2' (an index)"]),
        ("/dev/nvidia0,1", ["'/dev/nvidia0' (a path)", "'1' (an index)"]),
        ("GPU,is,lost", ["'GPU'"]),
        ("Driver/library,version,mismatch", ["'Driver/library'"]),
        ("Connection,refused", ["'Connection'"]),
        ("all", ["'all'", "NVIDIA's variables"]),
        ("void", ["'void'", "NVIDIA's variables"]),
        ("NoDevFiles", ["'NoDevFiles'", "NVIDIA's variables"]),
        ("0,ALL", ["'ALL'", "NVIDIA's variables"]),
        ("-", ["'-'", "without a digit"]),
        ("0-3", ["'0-3'", "a range"]),
        ("0-", ["'0-'", "a range"]),
        ("0..3", ["'0..3'", "a range"]),
        ("0|1", ["'0|1'", "a range"]),
        ("0/1", ["'0/1'", "a range"]),
        ("1.5", ["'1.5'", "a range"]),
        ("-1", ["'-1'", "a number with a sign"]),
        ("+1", ["'+1'", "a number with a sign"]),
    ],
)
async def test_what_is_no_name_of_one_gpu_is_an_error_that_shows_it(
    tmp_path: Path, printed: str, shown: list[str], contract: str
) -> None:
    with pytest.raises(TemporaryDriverError, match="the discovery script named ") as failure:
        await named(tmp_path, printed, contract)
    assert all(words in str(failure.value) for words in shown)
    assert f"it named: {printed}" in str(failure.value) or A.upper()[:12] in printed


@given(st.lists(st.from_regex(r"0{0,2}[0-9]|(GPU|gpu)-[aA]{8}(-1{4}){3}-[aA]{12}|GPU-[aA]{1,3}1", fullmatch=True)))
def test_no_two_names_of_an_answer_mean_one_gpu(words: list[str]) -> None:
    try:
        names = gpu_names(words)
    except TemporaryDriverError:
        return
    assert gpu_names(names) == names
    for one, other in itertools.combinations(names, 2):
        if re.fullmatch("[0-9]+", one):
            assert int(one) != int(other)
        else:
            assert not one.lower().startswith(other.lower())
            assert not other.lower().startswith(one.lower())
