"""The checker on a broker that lets nobody in unasked: it logs in as the manager does, and needs to read only."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka.admin import NewTopic

from outfitter_verify import UnreadableError, verify
from support.kafka.secure_broker import SecureBroker, right, secure_broker

__all__ = ["secure_broker"]

TOPICS = [f"t-login.{name}" for name in ("registrations", "allocations", "history", "dead-letters")]

pytestmark = pytest.mark.kafka


def environment(login: dict[str, str]) -> dict[str, str]:
    return {f"OUTFITTER_KAFKA_{name.upper().replace('-', '_')}": value for name, value in login.items()}


def test_it_logs_in_with_a_password_a_token_or_a_certificate_and_says_what_is_wrong(
    secure_broker: SecureBroker, tmp_path: Path
) -> None:
    for future in secure_broker.admin.create_topics([NewTopic(name, 1, 1) for name in TOPICS]).values():
        future.result(20)
    reads = [right(f"User:{name}", "READ", "TOPIC", "t-login.", prefixed=True) for name in ("scram", "oauth", "mutual")]
    secure_broker.allow(*reads)

    scram = secure_broker.scram("scram")
    ways = {"sasl": [scram, secure_broker.oauth("oauth")], "mutual": [secure_broker.mutual("mutual")]}
    for listener, logins in ways.items():
        for login in logins:
            report = verify(secure_broker.at(listener), "t-login", environment=environment(login), patience_s=20)
            assert report.ok
            assert verify(secure_broker.at(listener), "t-login", login=login, environment={}, patience_s=20).ok

    wrong = tmp_path / "wrong"
    wrong.write_text("not this one")
    refused = {
        "Authentication failed": {**scram, "sasl-password-file": str(wrong)},
        "certificate verify failed": {**scram, "ca-file": str(secure_broker.other_ca)},
        "authorization failed": secure_broker.scram("nobody"),
        "No such file": {**scram, "sasl-password-file": str(tmp_path / "none")},
    }
    for why, login in refused.items():
        with pytest.raises(UnreadableError, match=f"(?i){why}"):
            verify(secure_broker.at("sasl"), "t-login", environment=environment(login), patience_s=10)
