"""`outfitter config check` and `show`, as programs and people see them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.processes.command_line import outfitter

GOOD = """
bus = "kafka://broker:9092"
external-resources = ["gpu", "off"]
[external-resource.gpu]
amount = 2
driver = "static"
kubernetes.config-key = "nvidia.com/gpu"
yarn.config-key = "yarn.io/gpu"
param.devices = "a"
param.device.a.api-token = "hunter2"
[external-resource.off]
amount = 0
"""
BAD = GOOD.replace("amount = 2", 'amount = "two"').replace("param.devices", "parm.devices")
GPU = "external-resources: gpu\nexternal-resource.gpu.amount: 1\nexternal-resource.gpu.driver: gpu\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.toml").write_text(GOOD)
    (tmp_path / "bad.toml").write_text(BAD)
    return tmp_path


def test_a_good_file_is_ok_in_words_and_in_json(folder: Path) -> None:
    plain = outfitter("config", "check", "good.toml", cwd=folder)
    assert (plain.returncode, plain.stdout) == (0, "ok\n")
    done = outfitter("config", "check", "good.toml", "--json", cwd=folder)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"ok": True, "problems": []})
    assert "switches off" in done.stderr


def test_a_bad_file_is_exit_code_one_with_every_problem(folder: Path) -> None:
    done = outfitter("config", "check", "bad.toml", "--json", cwd=folder)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["ok"]) == (1, False)
    assert {problem["key"]: problem["found"] for problem in answer["problems"]} == {
        "external-resource.gpu.amount": "two",
        "external-resource.gpu.parm.devices": "a",
    }
    for problem in answer["problems"]:
        assert problem.keys() >= {"key", "found", "problem", "suggestion"}
    people = outfitter("config", "check", "bad.toml", cwd=folder)
    assert people.returncode == 1
    assert len(people.stdout.splitlines()) == 2
    assert "bad.toml: external-resource.gpu.amount: must be a whole number" in people.stdout


def checked(folder: Path, text: str) -> tuple[int, list[dict[str, str]]]:
    (folder / "x.yaml").write_text(text)
    done = outfitter("config", "check", "x.yaml", "--json", cwd=folder)
    return done.returncode, json.loads(done.stdout)["problems"]


def test_a_setting_that_its_driver_does_not_know_is_an_error(folder: Path) -> None:
    code, (problem,) = checked(folder, GPU + "external-resource.gpu.param.discovery-scrpt.args: x\n")
    assert code == 1
    assert (problem["key"], problem["found"]) == ("external-resource.gpu.param.discovery-scrpt.args", "x")
    assert problem["suggestion"] == "did you mean external-resource.gpu.param.discovery-script.args?"
    assert problem["file"] == "x.yaml line 4"


def test_a_script_that_may_be_on_another_machine_is_a_warning(folder: Path) -> None:
    code, (problem,) = checked(folder, GPU + "external-resource.gpu.param.discovery-script.path: /nowhere/x.sh\n")
    assert (code, problem["severity"]) == (0, "warning")
    assert problem["key"] == "external-resource.gpu.param.discovery-script.path"
    code, (problem,) = checked(folder, GPU + "external-resource.gpu.param.discovery-script.path: /etc\n")
    assert (code, problem["severity"]) == (1, "error")


def test_a_python_path_that_leads_nowhere_is_an_error(folder: Path) -> None:
    code, (problem,) = checked(folder, GPU.replace("driver: gpu", "driver: no.such.module:Factory"))
    assert (code, problem["found"]) == (1, "no.such.module:Factory")
    assert "cannot be loaded" in problem["problem"]


def test_warnings_leave_the_exit_code_at_zero(folder: Path) -> None:
    (folder / "x.yaml").write_text("external-resources: x\nexternal.x.amount: 1\n")
    done = outfitter("config", "check", "x.yaml", "--json", cwd=folder)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["ok"]) == (0, True)
    assert [problem["severity"] for problem in answer["problems"]] == ["warning"]


def test_a_report_that_a_manager_would_refuse_for_its_names_is_a_warning(folder: Path) -> None:
    (devices := folder / "devices").mkdir()
    for number in range(64):
        aliases = ";".join(f"{number}-{each}-".ljust(500, "n") for each in range(8))
        (devices / str(number)).write_text(f"id=GPU-{number}\naliases={aliases}\n")
    each = (
        "\nexternal-resource.{0}.amount: 1\nexternal-resource.{0}.driver: files\nexternal-resource.{0}.param.path: {1}"
    )
    resources = "".join(each.format(name, devices) for name in ("one", "two"))
    code, (problem,) = checked(folder, f"external-resources: one;two{resources}\n")
    assert (code, problem["severity"], problem["found"]) == (0, "warning", "files")
    assert problem["key"] == "external-resource.two.driver-factory.class"
    assert "the report of the driver of two is refused: the names of its devices take 2" in problem["problem"]


def test_show_prints_the_resources_in_effect_with_secrets_masked(folder: Path) -> None:
    done = outfitter("config", "show", "good.toml", "--json", cwd=folder)
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["resources"].keys() == {"gpu"}
    gpu = answer["resources"]["gpu"]
    assert (gpu["amount"], gpu["driver"]) == (2, "static")
    assert gpu["params"] == {"devices": "a", "device.a.api-token": "***"}
    assert (gpu["kubernetes_key"], gpu["yarn_key"]) == ("nvidia.com/gpu", "yarn.io/gpu")
    assert answer["not_in_effect"]["off"]["state"] == "disabled"
    assert answer["settings"]["bus"]["value"] == "kafka://broker:9092"
    assert "hunter2" not in done.stdout + outfitter("config", "show", "good.toml", cwd=folder).stdout


def test_show_tells_where_each_value_came_from(folder: Path) -> None:
    done = outfitter(
        "config", "show", "good.toml", "--set", "lease=7s",
        cwd=folder, environment={"OUTFITTER_CLUSTER": "prod"},
    )  # fmt: skip
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()}
    assert rows["lease"] == ["7s", "command line"]
    assert rows["cluster"] == ["prod", "environment OUTFITTER_CLUSTER"]
    assert rows["external-resource.gpu.amount"] == ["2", "good.toml"]
    assert rows["lease-grace"] == ["2s", "default"]


def test_show_leaves_out_a_misconfigured_resource_and_says_so(folder: Path) -> None:
    done = outfitter("config", "show", "bad.toml", "--json", cwd=folder)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["resources"]) == (0, {})
    assert answer["not_in_effect"]["gpu"]["state"] == "misconfigured"
    assert "external-resource.gpu.amount" in done.stderr


def test_show_leaves_out_a_resource_whose_driver_cannot_be_had(folder: Path) -> None:
    (folder / "x.yaml").write_text(GPU.replace("driver: gpu", "driver: no.such.module:Factory"))
    done = outfitter("config", "show", "x.yaml", "--json", cwd=folder)
    answer = json.loads(done.stdout)
    assert answer["resources"] == {}
    assert answer["not_in_effect"]["gpu"]["state"] == "misconfigured"
    assert "no.such.module" in answer["not_in_effect"]["gpu"]["reason"]
    assert "no.such.module" in done.stderr
    rows = outfitter("config", "show", "x.yaml", cwd=folder).stdout
    assert "misconfigured: external-resource.gpu.driver-factory.class: its driver says" in rows


def test_what_a_driver_warns_of_names_the_whole_key_everywhere(folder: Path) -> None:
    key = "external-resource.gpu.param.discovery-script.args"
    text = GPU + f"{key}: --enable-coordination-mode\n"
    code, (problem,) = checked(folder, text)
    assert (code, problem["key"], problem["severity"]) == (0, key, "warning")
    assert "--enable-coordination-mode is ignored" in problem["problem"]
    assert f"{key}: " in outfitter("config", "show", "x.yaml", cwd=folder).stderr
    told = outfitter("discover", "gpu", "--config", "x.yaml", cwd=folder).stderr
    assert f"outfitter: {key}: --enable-coordination-mode is ignored" in told


def test_no_file_says_which_were_tried(tmp_path: Path) -> None:
    done = outfitter("config", "show", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    for tried in ("--config", "OUTFITTER_CONFIG", "./outfitter.toml", "/etc/outfitter/outfitter.toml"):
        assert tried in done.stderr


def test_the_file_is_found_as_everywhere(folder: Path) -> None:
    (folder / "outfitter.toml").write_text(GOOD)
    assert outfitter("config", "check", cwd=folder).returncode == 0
    assert outfitter("config", "check", cwd=folder, environment={"OUTFITTER_CONFIG": "bad.toml"}).returncode == 1
    assert outfitter("config", "check", "--config", "bad.toml", cwd=folder).returncode == 1


def test_what_is_about_a_whole_file_names_no_key(tmp_path: Path) -> None:
    done = outfitter("config", "check", "none.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "error: none.toml: cannot be read: No such file or directory\n")
    told = json.loads(outfitter("config", "check", "none.toml", "--json", cwd=tmp_path).stdout)
    assert told["problems"][0]["key"] is None


def problems(path: Path, text: str) -> list[dict[str, str]]:
    (path / "a.toml").write_text(text)
    done = outfitter("config", "check", "--json", "a.toml", cwd=path)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
    return found["problems"]


FOLDER = 'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "files"\n'


def test_a_misspelt_parameter_is_blamed_itself_with_its_own_value(tmp_path: Path) -> None:
    [unknown, missing] = problems(tmp_path, FOLDER + 'param.pth = "gpus"\nparam.path = "nonexisting"\n')
    assert (unknown["key"], unknown["found"], unknown["severity"]) == (
        "external-resource.gpu.param.pth",
        "gpus",
        "error",
    )
    assert unknown["suggestion"] == "did you mean external-resource.gpu.param.path?"
    assert unknown["problem"] == "its driver says: pth is an unknown setting"
    assert (missing["key"], missing["severity"]) == ("external-resource.gpu.param.path", "warning")
    assert "does not exist now" in missing["problem"]


def test_what_is_wrong_with_the_manager_and_with_each_driver_is_said_in_one_round(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        'http = "nonsense"\nlease = "soon"\n'
        + FOLDER.replace('"gpu"]', '"gpu", "fpga"]').replace("amount = 1", "amount = -1")
        + 'param.pth = "gpus"\nparam.pol-interval = "1s"\nparam.nothing-like-it = "x"\n'
        + '[external-resource.fpga]\namount = 1\ndriver = "static"\nparam.count = "many"\nparam.cuont = "2"\n',
    )
    assert {problem["key"] for problem in found if problem["severity"] == "error"} == {
        "http",
        "lease",
        "external-resource.gpu.amount",
        "external-resource.gpu.param.pth",
        "external-resource.gpu.param.pol-interval",
        "external-resource.gpu.param.nothing-like-it",
        "external-resource.fpga.param.count",
        "external-resource.fpga.param.cuont",
    }


@pytest.mark.parametrize("text", ["", "# nothing\n", "external-resources = []\n", 'lease = "30s"\n'])
def test_a_file_that_serves_nothing_is_said_to(tmp_path: Path, text: str) -> None:
    [problem] = problems(tmp_path, text)
    assert (problem["key"], problem["severity"]) == ("external-resources", "warning")
    assert "no resource" in problem["problem"]


def test_a_setting_of_one_device_or_one_host_is_blamed_itself(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        'external-resources = ["a", "b"]\n[external-resource.a]\namount = 1\ndriver = "static"\n'
        'param.device.x.health = "ill"\n[external-resource.b]\namount = 1\ndriver = "static"\n'
        'param.hosts.h.count = "many"\n',
    )
    assert {problem["key"]: problem["problem"].partition(";")[0] for problem in found} == {
        "external-resource.a.param.device.x.health": "its driver says: device.x.health is 'ill'",
        "external-resource.b.param.hosts.h.count": "its driver says: hosts.h.count is 'many'",
    }


def test_a_device_that_is_described_and_not_declared_is_blamed_itself(tmp_path: Path) -> None:
    [problem] = problems(
        tmp_path,
        'external-resources = ["a"]\n[external-resource.a]\namount = 1\ndriver = "static"\n'
        'param.devices = "x;y"\nparam.device.z.id = "LIC-1"\n',
    )
    assert (problem["key"], problem["found"]) == ("external-resource.a.param.device.z.id", "LIC-1")
    assert problem["problem"] == "its driver says: device.z.id describes 'z', which is not among the devices: x, y"
    assert problem["file"]


FOREIGN = """
from outfitter_drivers.api import DriverParams, ExternalResourceDriverFactory

class Factory(ExternalResourceDriverFactory):
    def create_external_resource_driver(self, config):
        for key in sorted(config):
            config.warn(f"{key}: is a lot")
        raise ValueError({words!r})
"""


@pytest.mark.parametrize(
    ("words", "key"), [("retries is a lot", "param.retries"), ("no retries", "driver-factory.class")]
)
def test_a_driver_that_says_no_key_is_taken_by_the_first_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, key: str
) -> None:
    (tmp_path / "foreign_driver.py").write_text(FOREIGN.replace("{words!r}", repr(words)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = problems(
        tmp_path,
        'external-resources = ["x"]\n[external-resource.x]\namount = 1\ndriver = "foreign_driver:Factory"\n'
        'param.retries = "9"\n',
    )
    assert [(problem["severity"], problem["key"]) for problem in found] == [
        ("warning", "external-resource.x.param.retries"),
        ("error", f"external-resource.x.{key}"),
    ]


ENDING = """
from outfitter_drivers.api import ExternalResourceDriverFactory

class PanicException(BaseException):
    pass

class Speechless(Exception):
    def __str__(self):
        raise SystemExit("no words at all")

class Factory(ExternalResourceDriverFactory):
    def create_external_resource_driver(self, config):
        raise eval(config["raised"])
"""


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        ("SystemExit(4)", "its driver says: SystemExit: 4"),
        ("SystemExit(0)", "its driver says: SystemExit: 0"),
        ("PanicException('unwrap of None')", "its driver says: PanicException: unwrap of None"),
        ("GeneratorExit", "its driver says: GeneratorExit"),
        ("KeyboardInterrupt", "its driver says: KeyboardInterrupt"),
        ("Speechless", "its driver says: Speechless: its message cannot be read (SystemExit)"),
    ],
)
def test_a_factory_that_wants_to_end_the_process_is_a_problem_of_its_resource(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str, words: str
) -> None:
    (tmp_path / "ending_driver.py").write_text(ENDING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [ending, wrong] = problems(
        tmp_path,
        'external-resources = ["x", "y"]\n[external-resource.x]\namount = 1\ndriver = "ending_driver:Factory"\n'
        f'param.raised = "{raised}"\n[external-resource.y]\namount = 1\ndriver = "static"\nparam.count = "many"\n',
    )
    assert (ending["key"], ending["problem"]) == ("external-resource.x.driver-factory.class", words)
    assert wrong["key"] == "external-resource.y.param.count"


def test_a_driver_that_a_manager_of_cluster_scope_cannot_serve_is_refused(tmp_path: Path) -> None:
    text = FOLDER + f'param.path = "{tmp_path}"\n'
    assert problems(tmp_path, text) == []
    [problem] = problems(tmp_path, 'scope = "cluster"\n' + text)
    assert (problem["key"], problem["found"]) == ("external-resource.gpu.driver-factory.class", "files")
    assert problem["problem"].startswith("driver files looks at the machine that it runs on")
    assert problem["severity"] == "error"


PREPARING = """
from outfitter_drivers.api import ExternalResourceDriver, ExternalResourceDriverFactory, Preparation

class Driver(ExternalResourceDriver, Preparation):
    async def retrieve_resource_info(self, amount, worker):
        return []

    async def prepare(self, grant):
        pass

    async def unprepare(self, grant):
        pass

class Factory(ExternalResourceDriverFactory):
    def create_external_resource_driver(self, config):
        driver = Driver()
        driver.call_timeout = eval(config["limit"])
        return driver
"""


@pytest.mark.parametrize(
    ("settings", "limit", "key", "words"),
    [
        ('sharing = "shared"\n', "1", "sharing", "sharing = shared does not go with its driver"),
        ("", "'soon'", "driver-factory.class", "its driver says: its driver's call_timeout is 'soon'"),
    ],
)
def test_a_driver_that_no_manager_can_serve_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, limit: str, key: str, words: str
) -> None:
    (tmp_path / "preparing_driver.py").write_text(PREPARING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [problem] = problems(
        tmp_path,
        'external-resources = ["x"]\n[external-resource.x]\namount = 1\ndriver = "preparing_driver:Factory"\n'
        f'{settings}param.limit = "{limit}"\n',
    )
    assert problem["key"] == f"external-resource.x.{key}"
    assert problem["problem"].startswith(words)
