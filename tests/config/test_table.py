"""The rows of the compatibility table: every key, its old spellings, and what is said about slips."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outfitter_service.config import ConfigProblem, Inspection
from outfitter_service.core.model import OnFailure, SpecState

Look = Callable[..., Inspection]
GPU = "external-resources: gpu\nexternal-resource.gpu.amount: 2\nexternal-resource.gpu.driver: static\n"


def of(problems: tuple[ConfigProblem, ...], severity: str) -> list[ConfigProblem]:
    return [problem for problem in problems if problem.severity == severity]


def test_the_documented_example_of_flink_works_as_pasted(look: Look) -> None:
    inspection = look(
        "external-resources: gpu;fpga\n"
        "external-resource.gpu.driver-factory.class: org.apache.flink.externalresource.gpu.GPUDriverFactory\n"
        "external-resource.gpu.amount: 2\n"
        "external-resource.gpu.param.discovery-script.args: --enable-coordination\n"
        "external-resource.fpga.driver-factory.class: org.apache.flink.externalresource.fpga.FPGADriverFactory\n"
        "external-resource.fpga.amount: 1\n"
        "external-resource.fpga.yarn.config-key: yarn.io/fpga\n"
    )
    assert inspection.errors == ()
    gpu, fpga = inspection.settings.resources
    assert (gpu.driver, gpu.state) == ("gpu", SpecState.OK)
    assert (fpga.driver, fpga.state, fpga.amount, fpga.in_effect) == (None, SpecState.NO_DRIVER, 1, True)
    (warning,) = of(inspection.problems, "warning")
    assert warning.key == "external-resource.fpga.driver-factory.class"
    assert "port it to Python" in warning.suggestion


OLD_SPELLINGS = {
    "external.gpu.amount: 3": ("amount", 3),
    "taskmanager.external-resource.gpu.amount: 3": ("amount", 3),
    "taskmanager.resource.gpu.amount: 3": ("amount", 3),
    "external-resource.gpu.kubernetes.key: nvidia.com/gpu": ("kubernetes_key", "nvidia.com/gpu"),
    "external-resource.gpu.yarn.key: yarn.io/gpu": ("yarn_key", "yarn.io/gpu"),
    "external-resource.gpu.discovery-script: /x.sh": ("params", {"discovery-script.path": "/x.sh"}),
}


@pytest.mark.parametrize("line", OLD_SPELLINGS)
def test_an_old_spelling_is_read_with_a_warning_that_names_the_right_one(look: Look, line: str) -> None:
    field, value = OLD_SPELLINGS[line]
    more = "" if field == "amount" else "\nexternal-resource.gpu.amount: 1"
    inspection = look(f"external-resources: gpu\n{line}{more}")
    assert inspection.errors == ()
    assert getattr(inspection.settings.resources[0], field) == value
    (warning,) = of(inspection.problems, "warning")
    assert warning.key == line.split(":")[0]
    assert warning.suggestion.startswith("write external-resource.gpu.")


@pytest.mark.parametrize("order", [1, -1])
def test_the_right_key_wins_over_an_old_spelling_beside_it(look: Look, order: int) -> None:
    lines = ["external.gpu.amount: 3", "external-resource.gpu.amount: 2"][::order]
    inspection = look("\n".join(["external-resources: gpu", *lines]))
    assert inspection.settings.resources[0].amount == 2
    assert inspection.errors == ()
    assert all(warning.key == "external.gpu.amount" for warning in of(inspection.problems, "warning"))


def test_other_keys_of_flink_below_the_old_prefixes_are_passed_over(look: Look) -> None:
    assert look("external.foo.bar: 1\ntaskmanager.resource.x.y: 1\ntaskmanager.memory.flink.size: 1g").problems == ()


SLIPS = {
    "external-resource.gpu.sharng: shared": "external-resource.gpu.sharing",
    "external-resource.gpu.driver-factory.clas: x": "external-resource.gpu.driver-factory.class",
    "external-resource.gpu.discovery-script.path: x": "external-resource.gpu.param.discovery-script.path",
    "external-resource.gpu: 2": "external-resource.gpu.amount",
    "external-resorce.gpu.amount: 2": "external-resource.gpu.amount",
    "external_resource.gpu.amount: 2": "external-resource.gpu.amount",
    "external-resources.gpu.amount: 2": "external-resource.gpu.amount",
    "external-resource: gpu": "external-resources",
    "outfitter.leese: 3s": "outfitter.lease",
}


@pytest.mark.parametrize("line", SLIPS)
def test_a_key_that_nobody_reads_is_an_error_with_the_nearest_known_key(look: Look, line: str) -> None:
    (error,) = look(f"{GPU}{line}\n").errors
    assert error.key == line.split(":")[0]
    assert error.found == line.split(": ")[1]
    assert error.suggestion == f"did you mean {SLIPS[line]}?"


def test_a_slip_in_one_resource_costs_that_one_only(look: Look) -> None:
    inspection = look(
        "external-resources: gpu;fpga\nexternal-resource.gpu.amount: 2\nexternal-resource.gpu.sharng: x\n"
        "external-resource.fpga.amount: 1\n"
    )
    gpu, fpga = inspection.settings.resources
    assert gpu.state is SpecState.MISCONFIGURED
    assert "external-resource.gpu.sharng" in gpu.reason
    assert fpga.state is SpecState.NO_DRIVER


def test_a_key_of_ours_without_its_prefix_in_a_file_of_flinks_is_a_warning(look: Look) -> None:
    (warning,) = look("bus: kafka://x:9092").problems
    assert (warning.severity, warning.suggestion) == ("warning", "did you mean outfitter.bus?")


def test_a_resource_that_is_not_listed_is_one_warning_and_not_in_effect(look: Look) -> None:
    inspection = look(f"{GPU}external-resource.gup.amount: 1\nexternal-resource.gup.driver: static\n")
    assert [item.name for item in inspection.settings.resources] == ["gpu"]
    (warning,) = of(inspection.problems, "warning")
    assert "does not list" in warning.problem
    assert warning.suggestion == "did you mean gpu?"


@pytest.mark.parametrize(
    ("value", "found", "words"),
    [
        ("gpu;;fpga", "", "item 2 of the list is blank"),
        ("gpu;none", "none", "can only be the whole value"),
        ("gpu/0", "gpu/0", "not a valid name"),
        ("gpu;'a", "gpu;'a", "the quote ' is never closed"),
        ("gpu;'a'b", "gpu;'a'b", "text follows a closing quote"),
    ],
)
def test_an_item_that_names_no_resource_is_named_itself(look: Look, value: str, found: str, words: str) -> None:
    error = look(f'external-resources: "{value}"').errors[0]
    assert (error.key, error.found) == ("external-resources", found)
    assert words in error.problem


def test_an_amount_of_zero_is_information_and_switches_the_resource_off(look: Look) -> None:
    inspection = look(GPU.replace("amount: 2", "amount: 0"))
    (gpu,) = inspection.settings.resources
    assert (gpu.state, gpu.in_effect) == (SpecState.DISABLED, False)
    assert "external-resource.gpu.amount is 0" in gpu.reason
    (information,) = inspection.problems
    assert information.severity == "info"


def test_a_missing_amount_names_the_key_to_add(look: Look) -> None:
    (error,) = look("external-resources: gpu").errors
    assert error.key == "external-resource.gpu.amount"
    assert error.found is None
    assert "0 to switch it off" in error.suggestion


KUBERNETES = {
    "nvidia.com/gpu": True, "test.com/test": True, "  nvidia.com/gpu ": True, "a/b": True, "x.y.z/A_b.c": True,
    "gpu": False, "nvidia.com/": False, "/gpu": False, "nvidia.com/gpu/x": False, "Nvidia.com/gpu": False,
    "nvidia..com/gpu": False, "nvidia.com/-gpu": False, "kubernetes.io/gpu": False, "x.kubernetes.io/gpu": False,
    "nvidia.com/" + "g" * 64: False, "cpu": False, "nvidia.com/g pu": False, "requests.nvidia.com/gpu": False,
    "mykubernetes.io/gpu": False, "kubernetes.io.my/gpu": True,
    ".".join(122 * "a") + ".b/gpu": False, ".".join(122 * "a") + "/gpu": True, "my.requests.com/gpu": True,
}  # fmt: skip
YARN = {
    "yarn.io/gpu": True, "gpu": True, " yarn.io/gpu ": True, "a.b-c/G_1.x-y": True,
    "yarn.io/": False, "/gpu": False, "1gpu": False, "yarn io/gpu": False, "a/b/c": False, "gpu!": False,
    "-a.io/gpu": False, "a-.io/gpu": False, "a.-io/gpu": False, "a.io-/gpu": False, "a--b.i/gpu": True, "-gpu": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("option", "key", "right"),
    [("kubernetes", key, right) for key, right in KUBERNETES.items()]
    + [("yarn", k, right) for k, right in YARN.items()],
)
def test_deployment_keys_are_trimmed_and_checked(look: Look, option: str, key: str, right: bool) -> None:
    inspection = look(f'{GPU}external-resource.gpu.{option}.config-key: "{key}"\n')
    if right:
        assert inspection.errors == ()
        assert getattr(inspection.settings.resources[0], f"{option}_key") == key.strip()
    else:
        (error,) = inspection.errors
        assert (error.key, error.found) == (f"external-resource.gpu.{option}.config-key", key)
        assert "write " in error.problem


@pytest.mark.parametrize("blank", ["", " "])
def test_a_blank_deployment_key_leaves_the_resource_out(look: Look, blank: str) -> None:
    inspection = look(f'{GPU}external-resource.gpu.kubernetes.config-key: "{blank}"\n')
    assert inspection.errors == ()
    assert inspection.settings.resources[0].kubernetes_key is None


@pytest.mark.parametrize("option", ["kubernetes", "yarn"])
def test_two_resources_with_one_key_are_an_error_for_both(look: Look, option: str) -> None:
    lines = [
        f"external-resource.{name}.amount: 1\nexternal-resource.{name}.{option}.config-key: x.io/y" for name in "abc"
    ]
    lines[2] = lines[2].replace("x.io/y", "x.io/z")
    inspection = look("\n".join(["external-resources: a;b;c", *lines]))
    (error,) = inspection.errors
    assert error.key == f"external-resource.b.{option}.config-key"
    assert "'a'" in error.problem
    assert [item.state for item in inspection.settings.resources] == [
        SpecState.MISCONFIGURED, SpecState.MISCONFIGURED, SpecState.NO_DRIVER,
    ]  # fmt: skip


def test_a_switched_off_resource_does_not_compete_for_a_key(look: Look) -> None:
    text = "external-resources: a;b\n" + "".join(
        f"external-resource.{name}.amount: {amount}\nexternal-resource.{name}.yarn.config-key: y\n"
        for name, amount in (("a", 0), ("b", 1))
    )
    assert look(text).errors == ()


def test_flinks_default_keys_are_suggested_for_gpu_and_never_applied(look: Look) -> None:
    inspection = look(GPU)
    assert inspection.settings.resources[0].kubernetes_key is None
    assert [problem.suggestion.split()[-1] for problem in of(inspection.problems, "info")] == [
        "nvidia.com/gpu",
        "yarn.io/gpu",
    ]


def test_who_deploys_nothing_hears_nothing_of_deployments(look: Look) -> None:
    toml = 'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "static"\nparam.count = 1\n'
    assert look(toml, "x.toml").problems == ()
    told = of(look(f'{toml}kubernetes.config-key = "nvidia.com/gpu"\n', "x.toml").problems, "info")
    assert [problem.key for problem in told] == ["external-resource.gpu.yarn.config-key"]


def test_an_unknown_driver_is_an_error_that_lists_the_known_ones(look: Look) -> None:
    (error,) = look(GPU.replace("static", "statik")).errors
    assert error.key == "external-resource.gpu.driver"
    assert "files" in error.problem
    assert error.suggestion == "did you mean static?"


def test_a_driver_may_be_a_python_path(look: Look) -> None:
    assert look(GPU.replace("static", "my.drivers:Factory")).settings.resources[0].driver == "my.drivers:Factory"
    (error,) = look(GPU.replace("static", "'my.drivers:'")).errors
    assert "package.module:Factory" in error.problem


def test_the_other_options_are_read_and_their_values_checked(look: Look) -> None:
    text = f"""{GPU}
external-resource.gpu.sharing: shared
external-resource.gpu.on-failure: no-info
external-resource.gpu.driver-timeout: 1m30s
"""
    (gpu,) = look(text).settings.resources
    assert (gpu.sharing, gpu.on_failure, gpu.timeout) == ("shared", OnFailure.NO_INFO, 90.0)
    for wrong in ("shared", "no-info", "1m30s"):
        (error,) = look(text.replace(wrong, "wrong")).errors
        assert error.found == "wrong"


def test_a_name_with_dots_is_the_longest_listed_one(look: Look) -> None:
    settings = look(
        "external-resources: a;a.b\nexternal-resource.a.amount: 1\nexternal-resource.a.b.amount: 2\n"
    ).settings
    assert {item.name: item.amount for item in settings.resources} == {"a": 1, "a.b": 2}


def test_parameters_reach_the_driver_as_text_prefix_stripped(look: Look) -> None:
    settings = look(
        """
external-resources = ["gpu"]
[external-resource.gpu]
amount = 1
[external-resource.gpu.param]
count = 8
flag = true
list = ["a", "b"]
device = [{id = "x"}, {id = "y"}]
"a.b" = " kept as it is "
""",
        "x.toml",
    ).settings
    assert settings.resources[0].params == {
        "count": "8",
        "flag": "true",
        "list": "a;b",
        "device.0.id": "x",
        "device.1.id": "y",
        "a.b": " kept as it is ",
    }


def test_a_list_where_one_value_belongs_is_an_error(look: Look) -> None:
    (error,) = look(GPU.replace("amount: 2", "amount: [1, 2]")).errors
    assert (error.key, error.found) == ("external-resource.gpu.amount", "1;2")


def test_every_problem_is_reported_at_once(look: Look) -> None:
    inspection = look(
        """
bus = "redis://x"
lease = "soon"
lese = 3
external-resources = ["gpu", "a,b", "", "fpga"]
[external-resource.gpu]
amount = -1
driver = "nope"
sharing = "both"
[external-resource.fpga]
amount = "x"
""",
        "x.toml",
    )
    assert sorted(problem.key for problem in inspection.errors) == sorted(
        [
            "lese",
            "external-resources",
            "external-resources",
            "external-resource.gpu.amount",
            "external-resource.gpu.driver",
            "external-resource.gpu.sharing",
            "external-resource.fpga.amount",
            "bus",
            "lease",
        ]
    )
