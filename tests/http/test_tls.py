"""A listener's certificate: renewed files count from the next connection on, and unusable ones change nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trustme

from outfitter_service.http.tls import Certificate, TlsError, certificate
from support.webhook import Authority


def test_files_that_are_not_usable_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("no certificate")
    for cert, key, authority in ((None, "k", None), (None, None, "ca"), ("missing", None, None),
                                 (str(tmp_path / "x.pem"), None, None)):  # fmt: skip
        with pytest.raises(TlsError, match=r"TLS (needs|cannot)"):
            certificate(cert, key, authority)
    assert certificate(None, None, None) is None


def test_a_renewed_certificate_is_taken_and_an_unchanged_one_is_not_read_again(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    served = Certificate(str(authority.cert), str(authority.key))
    first = served.context()
    assert served.context() is first
    authority.renew()
    second = served.context()
    assert second is not first
    assert served.context() is second
    assert (served.renewals, served.failures) == (1, 0)


def test_a_half_renewed_certificate_keeps_the_earlier_one_until_it_is_whole(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    served = Certificate(str(authority.cert), str(authority.key))
    first, key = served.context(), authority.key.read_bytes()
    authority.renew()
    new_key = authority.key.read_bytes()
    for content in (key, b"garbage", None):
        authority.key.unlink()
        if content is not None:
            authority.key.write_bytes(content)
        assert served.context() is first
        assert served.context() is first
        assert served.is_refused
    assert served.renewals == 0
    assert served.failures >= 2
    authority.key.write_bytes(new_key)
    assert served.context() is not first
    assert served.renewals == 1
    assert not served.is_refused


def test_a_certificate_behind_a_symbolic_link_is_renewed_as_kubelet_renews_a_volume(tmp_path: Path) -> None:
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        Authority(tmp_path / version)
    (tmp_path / "..data").symlink_to("1")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    served = Certificate(str(tmp_path / "tls.crt"), str(tmp_path / "tls.key"))
    first = served.context()
    (tmp_path / "new").symlink_to("2")
    (tmp_path / "new").replace(tmp_path / "..data")
    assert served.context() is not first


def test_a_key_with_a_password_is_an_error_and_no_prompt(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    issued = trustme.CA().issue_cert("localhost")
    (tmp_path / "tls.crt").write_bytes(issued.cert_chain_pems[0].bytes())
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    (tmp_path / "tls.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(os.urandom(8).hex().encode()),
        )
    )
    with pytest.raises(TlsError):
        Certificate(str(tmp_path / "tls.crt"), str(tmp_path / "tls.key"))
