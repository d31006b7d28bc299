"""What makes a GPU ill."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_drivers.nvidia.faults import Faults
from outfitter_drivers.nvidia.health import of_gpu
from outfitter_drivers.nvidia.snapshot import XID, Event, Gpu, MigInstance
from outfitter_drivers.nvidia.xid import CATALOG, XidClass, XidClasses, parsed
from outfitter_drivers.settings import SettingError
from outfitter_proto.records import Health

WELL = {"recovery_action": 0, "remapping_failed": False, "remapping_pending": False}
CLASSES = XidClasses()


def gpu(**fields: object) -> Gpu:
    return Gpu(index=0, uuid="GPU-a", **{**WELL, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "health", "reason"),
    [
        (gpu(), "healthy", None),
        (gpu(failure=15), "unhealthy", "NVML: the GPU is lost (NVML code 15)"),
        (gpu(failure=16), "unhealthy", "NVML: the GPU must be reset (NVML code 16)"),
        (gpu(failure=999), "unknown", "NVML: unknown error (NVML code 999)"),
        (gpu(recovery_action=1), "unhealthy", "NVML's recovery action is Reset"),
        (gpu(recovery_action=2), "unhealthy", "NVML's recovery action is Reboot"),
        (gpu(recovery_action=3), "unhealthy", "NVML's recovery action is Drain P2P"),
        (gpu(recovery_action=99), "unhealthy", "NVML's recovery action is recovery action 99"),
        (gpu(remapping_failed=True), "unhealthy", "a row of its memory could not be remapped"),
        (gpu(remapping_pending=True), "unhealthy", "rows of its memory are remapped at the next reset"),
        (gpu(retired_pages_pending=True), "unhealthy", "pages of its memory are retired at the next reset"),
        (
            gpu(unreadable={"recovery_action": 999}),
            "unknown",
            "NVML does not tell its health (recovery action: unknown",
        ),
        (gpu(recovery_action=None, remapping_failed=None), "healthy", None),
    ],
)
def test_a_gpu_is_as_ill_as_its_worst_level_and_says_why(told: Gpu, health: str, reason: str | None) -> None:
    verdict = of_gpu(told, None, CLASSES)
    assert verdict.health == health
    assert (verdict.reason or "").startswith(reason or "")
    assert (verdict.reason is None) == (health == "healthy")


@given(
    st.builds(
        gpu,
        failure=st.none() | st.sampled_from([2, 4, 15, 16, 999]),
        recovery_action=st.none() | st.integers(0, 9),
        remapping_failed=st.none() | st.booleans(),
        remapping_pending=st.none() | st.booleans(),
        retired_pages_pending=st.none() | st.booleans(),
        unreadable=st.dictionaries(st.sampled_from(["mig", "levels"]), st.sampled_from([10, 999]), max_size=2),
    )
)
def test_a_gpu_with_any_fault_is_never_healthy(told: Gpu) -> None:
    faults = (
        told.failure,
        told.recovery_action,
        told.remapping_failed,
        told.remapping_pending,
        told.retired_pages_pending,
        told.unreadable,
    )
    verdict = of_gpu(told, None, CLASSES)
    assert (verdict.health is Health.HEALTHY) == (not any(faults))


def xid(code: int, uuid: str = "GPU-a", **more: int) -> Event:
    return Event(uuid=uuid, kind=XID, data=code, **more)


OLD = gpu(recovery_action=None)
"""A GPU whose driver does not tell the recovery action."""


def health_after(told: Gpu, *events: Event, classes: XidClasses = CLASSES) -> Health:
    faults = Faults(classes)
    faults.note(events)
    return faults.verdict(told).health


@pytest.mark.parametrize(("code", "health"), [(79, "unhealthy"), (62, "unhealthy"), (13, "healthy"), (63, "healthy")])
def test_with_an_old_driver_the_last_xid_of_a_reset_or_a_reboot_counts(code: int, health: str) -> None:
    assert health_after(OLD, xid(code)) == health


def test_an_xid_counts_for_its_gpu_only_and_a_later_harmless_one_does_not_heal_it() -> None:
    assert health_after(OLD, xid(79, "GPU-b")) is Health.HEALTHY
    assert health_after(OLD, xid(79), xid(13)) is Health.UNHEALTHY


@pytest.mark.parametrize(
    ("place", "ill"),
    [
        ({}, ["MIG-a", "MIG-b", "MIG-c"]),
        ({"gpu_instance": 1}, ["MIG-a", "MIG-b"]),
        ({"gpu_instance": 1, "compute_instance": 1}, ["MIG-b"]),
    ],
)
def test_an_xid_is_about_all_instances_that_it_does_not_exclude(place: dict[str, int], ill: list[str]) -> None:
    instances = (
        MigInstance(slot=0, uuid="MIG-a", gpu_instance=1, compute_instance=0),
        MigInstance(slot=1, uuid="MIG-b", gpu_instance=1, compute_instance=1),
        MigInstance(slot=2, uuid="MIG-c", gpu_instance=2, compute_instance=0),
    )
    told = gpu(recovery_action=None, mig=True, mig_pending=True, instances=instances)
    faults = Faults(CLASSES)
    faults.note([xid(62, **place)])
    verdicts = {each.uuid: faults.verdict_of_instance(told, each) for each in instances}
    assert [uuid for uuid, verdict in verdicts.items() if verdict.health is Health.UNHEALTHY] == ill


def test_where_the_driver_tells_the_recovery_action_the_level_counts_and_no_xid() -> None:
    assert health_after(gpu(), xid(79)) is Health.HEALTHY


def test_an_xid_that_a_setting_classes_counts_with_any_driver() -> None:
    assert health_after(gpu(), xid(63), classes=XidClasses({"reset": "63"})) is Health.UNHEALTHY
    assert health_after(OLD, xid(79), classes=XidClasses({"ignore": "79"})) is Health.HEALTHY


def test_an_unknown_xid_is_a_reason_to_look_and_no_illness() -> None:
    assert CLASSES.of(12345) is None
    assert health_after(OLD, xid(12345)) is Health.HEALTHY


def test_another_driver_version_and_a_release_end_what_an_xid_said() -> None:
    faults = Faults(CLASSES)
    faults.at_driver("550.1")
    faults.note([xid(79)])
    faults.at_driver("550.1")
    assert faults.verdict(OLD).health is Health.UNHEALTHY
    faults.at_driver("560.1")
    assert faults.verdict(OLD).health is Health.HEALTHY
    faults.note([xid(79)])
    faults.forget()
    assert faults.verdict(OLD).health is Health.HEALTHY


def test_no_code_of_the_catalog_is_in_two_classes() -> None:
    codes = [code for kind, text in CATALOG.items() for code in parsed(text, kind)]
    assert len(codes) == len(set(codes))


def test_lists_of_codes_have_numbers_and_ranges() -> None:
    assert parsed("13; 39-41;;79", "xid.reset") == [13, 39, 40, 41, 79]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reset": "x"}, r"xid\.reset has 'x'; valid are codes and ranges"),
        ({"reset": "9-3"}, r"xid\.reset has '9-3'"),
        ({"reset": "1-99999"}, r"xid\.reset has '1-99999'"),
        ({"fatal": "79"}, r"xid\.fatal names no class of Xids; valid are application, ignore, reset, reboot, look"),
        ({"reset": "63", "ignore": "60-64"}, r"xid\.ignore has 63, and so has xid\.reset; keep one"),
    ],
)
def test_a_wrong_class_or_code_is_refused_by_name(settings: dict[str, str], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        XidClasses(settings)


def test_classes_say_what_to_do() -> None:
    assert (CLASSES.of(79), CLASSES.of(31), CLASSES.of(43)) == (
        XidClass.REBOOT,
        XidClass.APPLICATION,
        XidClass.IGNORE,
    )


def test_a_flood_of_xids_is_one_line_for_each_kind_and_gpu(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(CLASSES)
    faults.note([xid(31) for _ in range(500)])
    faults.note([xid(31), xid(31, "GPU-\nb"), xid(43)])
    assert [record.getMessage() for record in caplog.records] == [
        "NVML reports Xid 31 on GPU-a: application",
        "NVML reports Xid 31 on GPU-\\nb: application",
        "NVML reports Xid 43 on GPU-a: ignore",
    ]
