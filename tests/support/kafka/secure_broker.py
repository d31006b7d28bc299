"""A real broker that lets nobody in unasked: a listener for each way of logging in, and the authorizer on.

`secure_broker` is one for a process's tests. All its credentials are made when it starts: a certificate authority of
its own (trustme), a key that signs tokens, SCRAM users. Whoever has no ACL may do nothing; `admin` may do everything.

    login = secure_broker.scram("manager")               # as `connect(url, login)` takes it
    secure_broker.allow(right("User:manager", "Read", "topic", name))
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import trustme
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from support.kafka.broker import READY_WITHIN, Broker, answers, free_port

_ANY = AclBindingFilter(
    ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY
)
LISTENERS = {
    "plain": "PLAINTEXT", "tls": "SSL", "mutual": "SSL", "othername": "SSL", "expired": "SSL",
    "sasl": "SASL_SSL", "open": "SASL_PLAINTEXT", "short": "SASL_PLAINTEXT",
}  # fmt: skip
"""`plain` wants nothing, `mutual` a client certificate; `othername` and `expired` show certificates that
are not to be believed; `open` is SASL without TLS, `short` the same with sessions of `SESSION_S`."""
SESSION_S = 6.0
ISSUER, AUDIENCE = "https://issuer.example", "kafka"
_LOGIN_MODULE = "org.apache.kafka.common.security"


class SecureBroker(Broker):
    """See the module. `folder` takes keys and certificates, too."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = trustme.CA()
        self.stranger = trustme.CA()
        self._signer = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._files = folder
        self._ports = {name: free_port() for name in LISTENERS}
        self.passwords = {"admin": secrets.token_urlsafe(18)}
        self.ca = self.write("ca.pem", self.authority.cert_pem.bytes())
        self.other_ca = self.write("other-ca.pem", self.stranger.cert_pem.bytes())
        self._certificate("server", self.authority, "127.0.0.1")
        self._certificate("othername", self.authority, "broker.example")
        yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        self._certificate("expired", self.authority, "127.0.0.1", not_after=yesterday)
        self.write("keys.json", json.dumps({"keys": [self._public_key()]}).encode())
        super().__init__(folder, self._broker_settings())
        self.port = self._ports["open"]
        self.bootstrap = f"127.0.0.1:{self.port}"
        self._admin: AdminClient | None = None

    # --- where and how ------------------------------------------------------------------------------------

    def at(self, listener: str) -> str:
        """The bus URL of a listener."""
        return f"kafka://127.0.0.1:{self._ports[listener]}"

    def scram(self, user: str, *, mechanism: str = "SCRAM-SHA-512", listener: str = "sasl") -> dict[str, str]:
        """How `user` logs in with a password; makes the user."""
        if user not in self.passwords:
            self.set_password(user, secrets.token_urlsafe(18), mechanism)
        protocol = LISTENERS[listener]
        login = {
            "security-protocol": protocol, "sasl-mechanism": mechanism, "sasl-username": user,
            "sasl-password-file": str(self.write(f"{user}.password", self.passwords[user].encode())),
        }  # fmt: skip
        return login | ({"ca-file": str(self.ca)} if protocol.endswith("SSL") else {})

    def administrator(self) -> dict[str, str]:
        """How `admin` logs in, at `open`."""
        return self.plain("admin", self.passwords["admin"])

    def plain(self, user: str, password: str) -> dict[str, str]:
        """How somebody logs in at `open` with PLAIN; the broker knows `admin` only."""
        return {
            "security-protocol": "SASL_PLAINTEXT", "sasl-mechanism": "PLAIN", "sasl-username": user,
            "sasl-password-file": str(self.write(f"{user}.plain", password.encode())),
        }  # fmt: skip

    def mutual(self, user: str, authority: trustme.CA | None = None, *, password: str | None = None) -> dict[str, str]:
        """How `user` shows a client certificate, whose key may be locked with a password."""
        self._certificate(user, authority or self.authority, f"{user}.example", common_name=user, password=password)
        return {
            "security-protocol": "SSL", "ca-file": str(self.ca),
            "cert-file": str(self._files / f"{user}.crt"), "key-file": str(self._files / f"{user}.key"),
        }  # fmt: skip

    def oauth(self, user: str, *, listener: str = "sasl", **claims: Any) -> dict[str, str]:
        """How `user` shows a token; `claims` replace those that the broker believes."""
        token = self.write(f"{user}.token", self.token(user, **claims).encode())
        protocol = LISTENERS[listener]
        login = {"security-protocol": protocol, "sasl-mechanism": "OAUTHBEARER", "sasl-token-file": str(token)}
        return login | ({"ca-file": str(self.ca)} if protocol.endswith("SSL") else {})

    def token(self, user: str, *, lifetime: float = 600.0, signed: bool = True, **claims: Any) -> str:
        """A JSON Web Token (RFC 7519)."""
        now = int(time.time())
        body = {"sub": user, "iss": ISSUER, "aud": AUDIENCE, "iat": now, "exp": now + int(lifetime), **claims}
        head = {"alg": "RS256", "kid": "test", "typ": "JWT"} if signed else {"alg": "none"}
        text = b".".join(_base64(json.dumps(part).encode()) for part in (head, body))
        signature = self._signer.sign(text, padding.PKCS1v15(), hashes.SHA256()) if signed else b""
        return (text + b"." + _base64(signature)).decode()

    # --- what an administrator does ---------------------------------------------------------------------------

    @property
    def admin(self) -> AdminClient:
        """librdkafka's administration client, as `admin`."""
        if self._admin is None:
            self._admin = self._client("admin", "PLAIN", self.passwords["admin"])
        return self._admin

    def set_password(self, user: str, password: str, mechanism: str = "SCRAM-SHA-512") -> None:
        """Make a user, or give it another password, and wait until it can log in with that: the controller answers
        before the broker has heard of it."""
        kind = getattr(ScramMechanism, mechanism.replace("-", "_"))
        change = UserScramCredentialUpsertion(user, ScramCredentialInfo(kind, 4096), password.encode())
        self._await(self.admin.alter_user_scram_credentials([change]))
        self._client(user, mechanism, password).list_topics(timeout=READY_WITHIN)
        self.passwords[user] = password

    def allow(self, *rights: AclBinding) -> None:
        """Grant rights, and wait until the broker goes by them."""
        self._await(self.admin.create_acls(list(rights)))
        self._until(lambda known: known.issuperset(rights))

    def withdraw(self, *rights: AclBinding) -> None:
        """Take rights away, and wait until they are gone."""
        self._await(self.admin.delete_acls([_only(right) for right in rights]))
        self._until(lambda known: known.isdisjoint(rights))

    def _until(self, condition: Callable[[set[AclBinding]], bool]) -> None:
        """The controller answers before the broker's authorizer has heard of a change; what that one knows it shows."""
        deadline = time.monotonic() + READY_WITHIN
        while not condition(set(self.admin.describe_acls(_ANY).result(20))):
            assert time.monotonic() < deadline, "the broker does not hear of a change of rights"

    def start(self) -> None:
        os.environ["JAVA_TOOL_OPTIONS"] = (
            f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={(self._files / 'keys.json').as_uri()}"
        )
        try:
            super().start()
        finally:
            del os.environ["JAVA_TOOL_OPTIONS"]
        deadline = time.monotonic() + READY_WITHIN
        # a broker opens its listeners one after the other
        while not all(answers(f"127.0.0.1:{port}") for port in self._ports.values()):
            assert time.monotonic() < deadline, "the broker does not open all of its listeners"
            time.sleep(0.05)

    # --- inside -------------------------------------------------------------------------------------------------

    def _client(self, user: str, mechanism: str, password: str) -> AdminClient:
        return AdminClient(
            {
                "bootstrap.servers": f"127.0.0.1:{self._ports['open']}", "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": mechanism, "sasl.username": user, "sasl.password": password, "log_level": 0,
            }
        )  # fmt: skip

    @staticmethod
    def _await(futures: Mapping[Any, Any]) -> None:
        for future in futures.values():
            future.result(20)

    def write(self, name: str, content: bytes) -> Path:
        """A file with a secret, replaced whole."""
        path = self._files / name
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes(content)
        unfinished.chmod(0o600)
        return unfinished.rename(path)

    def _certificate(
        self,
        name: str,
        authority: trustme.CA,
        host: str,
        *,
        common_name: str | None = None,
        not_after: datetime.datetime | None = None,
        password: str | None = None,
    ) -> None:
        made = authority.issue_cert(host, common_name=common_name, not_after=not_after)
        key = serialization.load_pem_private_key(made.private_key_pem.bytes(), None)
        lock = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
        # Kafka takes no other form than PKCS#8.
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
        chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        self.write(f"{name}.pem", pem + chain)
        self.write(f"{name}.key", pem)
        self.write(f"{name}.crt", chain)

    def _public_key(self) -> dict[str, str]:
        """A JSON Web Key (RFC 7517)."""
        numbers = self._signer.public_key().public_numbers()
        n = _base64(numbers.n.to_bytes((numbers.n.bit_length() + 7) // 8, "big")).decode()
        e = _base64(numbers.e.to_bytes(3, "big")).decode()
        return {"kty": "RSA", "kid": "test", "use": "sig", "alg": "RS256", "n": n, "e": e}

    def _broker_settings(self) -> dict[str, str]:
        controller = free_port()
        where = {name.upper(): f"127.0.0.1:{port}" for name, port in self._ports.items()}
        protocols = {name.upper(): protocol for name, protocol in LISTENERS.items()} | {"CONTROLLER": "SASL_PLAINTEXT"}
        password = self.passwords["admin"]
        plain = (
            f'{_LOGIN_MODULE}.plain.PlainLoginModule required username="admin" password="{password}" '
            f'user_admin="{password}";'
        )
        scram = f"{_LOGIN_MODULE}.scram.ScramLoginModule required;"
        settings = {
            "listeners": ",".join(f"{n}://{a}" for n, a in (where | {"CONTROLLER": f"127.0.0.1:{controller}"}).items()),
            "advertised.listeners": ",".join(f"{name}://{address}" for name, address in where.items()),
            "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "inter.broker.listener.name": "OPEN",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "sasl.mechanism.controller.protocol": "PLAIN",
            "listener.name.controller.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.controller.plain.sasl.jaas.config": plain,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:admin",
            "connection.failed.authentication.delay.ms": "100",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.ca),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self._files / "server.pem"),
            "listener.name.othername.ssl.keystore.type": "PEM",
            "listener.name.othername.ssl.keystore.location": str(self._files / "othername.pem"),
            "listener.name.expired.ssl.keystore.type": "PEM",
            "listener.name.expired.ssl.keystore.location": str(self._files / "expired.pem"),
            "listener.name.mutual.ssl.client.auth": "required",
            "ssl.principal.mapping.rules": "RULE:^.*CN=([^,]+).*$/$1/,DEFAULT",
        }
        for name in ("sasl", "open", "short"):
            of = f"listener.name.{name}"
            settings |= {
                f"{of}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512,SCRAM-SHA-256,OAUTHBEARER"
                if name == "open"
                else "SCRAM-SHA-512,OAUTHBEARER",
                f"{of}.plain.sasl.jaas.config": plain,
                f"{of}.scram-sha-256.sasl.jaas.config": scram,
                f"{of}.scram-sha-512.sasl.jaas.config": scram,
                f"{of}.oauthbearer.sasl.jaas.config": f"{_LOGIN_MODULE}.oauthbearer.OAuthBearerLoginModule required;",
                f"{of}.oauthbearer.sasl.server.callback.handler.class": (
                    f"{_LOGIN_MODULE}.oauthbearer.OAuthBearerValidatorCallbackHandler"
                ),
                f"{of}.oauthbearer.sasl.oauthbearer.jwks.endpoint.url": (self._files / "keys.json").as_uri(),
                f"{of}.oauthbearer.sasl.oauthbearer.expected.audience": AUDIENCE,
                f"{of}.oauthbearer.sasl.oauthbearer.expected.issuer": ISSUER,
            }
        for mechanism in ("scram-sha-512", "oauthbearer"):
            settings[f"listener.name.short.{mechanism}.connections.max.reauth.ms"] = str(int(SESSION_S * 1000))
        return settings


def right(principal: str, operation: str, kind: str, name: str, *, prefixed: bool = False) -> AclBinding:
    """An ACL as `kafka-acls` would make it: `right("User:w", "Write", "topic", "outfitter.registrations")`."""
    kind = {"transactional-id": "transactional_id"}.get(kind, kind)
    operation = {"DescribeConfigs": "describe_configs"}.get(operation, operation)
    pattern = ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL
    return AclBinding(
        ResourceType[kind.upper()],
        name,
        pattern,
        principal,
        "*",
        AclOperation[operation.upper()],
        AclPermissionType.ALLOW,
    )


def _only(of: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        of.restype, of.name, of.resource_pattern_type, of.principal, of.host, of.operation, of.permission_type
    )


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


@pytest.fixture(scope="session")
def secure_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    """One broker for this process: use principals and a cluster of your own."""
    broker = SecureBroker(tmp_path_factory.mktemp("kafka"))
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()
