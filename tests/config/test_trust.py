"""Whose a configuration is: one that nobody has named and others may write is not believed, a named one is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outfitter_proto.support import file_ownership
from outfitter_service.config import ConfigurationError, connection, inspect, load, sources
from support.processes.command_line import outfitter

CONFIG = 'bus = "sqlite:////nowhere/theirs.db"\n'


def as_seen(path: Path, **changes: int) -> os.stat_result:
    found = path.stat()
    mode, uid = changes.get("mode", found.st_mode), changes.get("uid", found.st_uid)
    return os.stat_result((mode, *found[1:4], uid, *found[5:]))


def test_a_file_is_ours_roots_or_of_who_called_sudo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.touch(mode=0o664)
    stranger = os.geteuid() + 4711
    monkeypatch.delenv("SUDO_UID", raising=False)
    assert file_ownership._doubt("f", as_seen(path)) is None
    assert file_ownership._doubt("f", as_seen(path, uid=0)) is None
    assert "belongs to user" in (file_ownership._doubt("f", as_seen(path, uid=stranger)) or "")
    assert "everybody may write f" in (file_ownership._doubt("f", as_seen(path, mode=0o100666)) or "")
    assert "everybody may write d" in (file_ownership._doubt("d", as_seen(tmp_path, mode=0o40777)) or "")
    assert file_ownership._doubt("d", as_seen(tmp_path, mode=0o41777)) is None  # sticky: what is ours there stays ours
    for word in (str(stranger), "x", "-1", "9" * 5000):
        monkeypatch.setenv("SUDO_UID", word)
        believed = os.geteuid() == 0 and word == str(stranger)
        assert (file_ownership._doubt("f", as_seen(path, uid=stranger)) is None) == believed


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_default_file_that_everybody_may_write_is_passed_over_and_that_is_said(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "outfitter.toml").write_text(CONFIG)
    if what == "file":
        (folder / "outfitter.toml").chmod(0o666)
    else:
        folder.chmod(0o777)
    done = outfitter("status", cwd=folder)
    assert "theirs.db" not in done.stdout + done.stderr
    assert "./outfitter.toml is not read: everybody may write" in done.stderr
    done = outfitter("serve", cwd=folder)
    assert done.returncode != 0
    assert "no configuration" in done.stderr
    assert "--config ./outfitter.toml" in done.stderr
    named = outfitter("status", "--config", "outfitter.toml", cwd=folder)
    assert "theirs.db" in named.stderr
    assert "everybody may write" in named.stderr


def test_a_default_file_of_ours_is_read_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "outfitter.toml").write_text(CONFIG)
    done = outfitter("status", cwd=tmp_path)
    assert "theirs.db" in done.stderr
    assert "not read" not in done.stderr


def test_a_stranger_s_default_file_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outfitter.toml").write_text(CONFIG)
    monkeypatch.setattr(sources, "DEFAULT_FILES", (Path("outfitter.toml"),))
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    if (tmp_path / "outfitter.toml").stat().st_uid == 0:
        monkeypatch.setattr(file_ownership, "_ours", lambda: {4711})
    assert connection(environment={}).bus != "sqlite:////nowhere/theirs.db"
    with pytest.raises(ConfigurationError, match="belongs to user"):
        load(environment={})
    assert connection("outfitter.toml", environment={}).bus == "sqlite:////nowhere/theirs.db"


def test_a_link_of_a_stranger_in_a_directory_of_everybody_is_passed_over(tmp_path: Path) -> None:
    if os.geteuid() != 0:  # nobody else can make another user's link, so look at the rule alone
        assert file_ownership.doubt(tmp_path) is None
        return
    ours = tmp_path / "ours.toml"
    ours.write_text(CONFIG)
    folder = tmp_path / "sticky"
    folder.mkdir()
    folder.chmod(0o1777)
    link = folder / "outfitter.toml"
    link.symlink_to(ours)
    assert file_ownership.doubt(link) is None
    os.chown(link, 4711, 4711, follow_symlinks=False)
    assert file_ownership.doubt(link) == f"{link} is a symbolic link of user 4711, who may change it"
    done = outfitter("status", cwd=folder)
    assert "theirs.db" not in done.stdout + done.stderr


def test_a_link_into_a_directory_that_everybody_may_write_is_doubted(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "target.toml").write_text(CONFIG)
    folder.chmod(0o777)
    link = tmp_path / "outfitter.toml"
    link.symlink_to(folder / "target.toml")
    assert f"everybody may write the directory of {folder}/target.toml" == file_ownership.doubt(link)


def test_a_named_file_and_a_secret_that_others_may_use_are_warned_of(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("hunter2")
    secret.chmod(0o644)
    path = tmp_path / "a.toml"
    path.write_text(
        'bus = "kafka://127.0.0.1:1"\n[kafka]\nsecurity-protocol = "SASL_SSL"\nsasl-username = "u"\n'
        'sasl-password-file = "password"\n'
    )
    path.chmod(0o646)
    inspection = inspect(path, {}, {})
    assert inspection.settings is not None
    told = {problem.key: problem.problem for problem in inspection.problems if problem.severity == "warning"}
    assert "everybody may write" in told[""]
    assert told["kafka.sasl-password-file"] == "names a secret, and everybody may read it"
    assert any(problem.suggestion == f"chmod o-r {secret}" for problem in inspection.problems)
    secret.chmod(0o640)
    path.chmod(0o644)
    assert not [problem for problem in inspect(path, {}, {}).problems if problem.severity == "warning"]


def test_a_script_that_everybody_may_write_is_warned_of(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho 0\n")
    script.chmod(0o777)
    path = tmp_path / "a.toml"
    path.write_text(
        'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "gpu"\n'
        f'param.discovery-script.path = "{script}"\n'
    )
    done = outfitter("config", "check", "a.toml", cwd=tmp_path)
    assert done.returncode == 0
    assert f"everybody may write {script}" in done.stdout
    script.chmod(0o755)
    assert "everybody" not in outfitter("config", "check", "a.toml", cwd=tmp_path).stdout
