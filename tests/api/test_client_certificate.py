"""Client certificates: two of them give one principal exactly if they have one name; unclear ones give none."""

from __future__ import annotations

import contextlib
import unicodedata
from base64 import encodebytes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.name import _ASN1Type
from cryptography.x509.oid import NameOID
from hypothesis import example, given
from hypothesis import strategies as st

from ferrule_server.api.security import auth, client_certificate
from ferrule_server.api.security.auth import CertificateAccess
from ferrule_server.api.security.client_certificate import MAX_NAME_BYTES, principal_of_pem
from ferrule_server.errors import TokenInvalid
from tests.api.certificates import Authority

# The parser warns of common names beyond 64 characters; these tests make longer ones.
pytestmark = pytest.mark.filterwarnings("ignore:Attribute's length")

AUTHORITY, SUCCESSOR = Authority(), Authority("successor")
UNICODE = (_ASN1Type.UTF8String, _ASN1Type.BMPString, _ASN1Type.UniversalString)
TYPES = (*UNICODE, _ASN1Type.T61String, _ASN1Type.IA5String, _ASN1Type.VisibleString)
# Few characters, so that names are often equal or nearly so: é in both forms of Unicode, controls, what is encoded.
CHARACTERS = "aA%20:/ =,.\0\n\x7f\x85\xa0é\u0435e\u0301\u200b\ufffd"
TEXTS = st.text(CHARACTERS, max_size=4) | st.sampled_from(["a" * MAX_NAME_BYTES, "a" * (MAX_NAME_BYTES + 1), "é" * 257])
ASCII = st.text([c for c in CHARACTERS if c.isascii()], max_size=4).map(lambda rest: f"a:{rest}") | TEXTS


@dataclass(frozen=True)
class Names:
    """What a certificate says of its holder: common names with their string types, URIs, and a host name or none."""

    common: tuple[tuple[str, _ASN1Type], ...] = ()
    uris: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def name(self) -> tuple[str, str] | None:
        """The kind and the exact name, by the words of docs/operations.md; None: nobody, or several."""
        if self.uris:
            uri = self.uris[0]
            return ("uri", uri) if _is_one(self.uris) and ":" in uri and uri.isascii() else None
        if not _is_one([text for text, _ in self.common]):
            return None
        (text, encoding) = self.common[0]
        return ("cn", text) if encoding in UNICODE or text.isascii() else None

    def signed(self, authority: Authority = AUTHORITY) -> bytes:
        """Return a new certificate with these names."""
        subject = [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "a"),
            *(x509.NameAttribute(NameOID.COMMON_NAME, text, kind, _validate=False) for text, kind in self.common),
        ]
        names = [x509.UniformResourceIdentifier._init_without_validation(uri) for uri in self.uris]
        return authority.of_subject(x509.Name(subject), [*names, *(x509.DNSName(host) for host in self.hosts)])


def _is_one(names: Sequence[str]) -> bool:
    """Whether this is one name of a usable length without control characters."""
    return (
        len(names) == 1
        and 1 <= len(names[0].encode()) <= MAX_NAME_BYTES
        and not any(unicodedata.category(character) == "Cc" for character in names[0])
    )


PRINTABLE = st.tuples(st.text("aA20:/ =,.", min_size=1, max_size=4), st.just(_ASN1Type.PrintableString))
COMMON = st.tuples(TEXTS, st.sampled_from(TYPES)) | PRINTABLE
NAMES = st.builds(
    Names,
    st.lists(COMMON, max_size=2).map(tuple),
    st.lists(ASCII, max_size=2).map(tuple),
    st.sampled_from([(), ("a.example",)]),
)
DAMAGED = Names((("ops", _ASN1Type.T61String),), hosts=("a.b",)).signed()
ONE_NAME = st.builds(Names, COMMON.map(lambda one: (one,))) | st.builds(Names, uris=ASCII.map(lambda one: (one,)))


@given(st.lists(ONE_NAME | NAMES, min_size=2, max_size=6))
@example([Names((("ops", _ASN1Type.UTF8String),)), Names((("ops\0x", _ASN1Type.UTF8String),))])
@example([Names((("ops", _ASN1Type.UTF8String),)), Names((("ops", _ASN1Type.BMPString),))])
@example([Names((("\u00e9", _ASN1Type.UTF8String),)), Names((("e\u0301", _ASN1Type.UTF8String),))])
@example([Names((("\u00e9", _ASN1Type.UTF8String),)), Names((("\u00e9", _ASN1Type.T61String),))])
@example([Names((("ops", _ASN1Type.UTF8String),)), Names((("Ops", _ASN1Type.UTF8String),))])
@example([Names((("a b", _ASN1Type.UTF8String),)), Names((("a%20b", _ASN1Type.UTF8String),))])
@example([Names(uris=("a:b c",)), Names(uris=("a:b%20c",)), Names(uris=("a:B c",))])
@example([Names((("a:b", _ASN1Type.UTF8String),)), Names(uris=("a:b",)), Names(uris=("a%3Ab",)), Names(uris=("a",))])
def test_principals_are_equal_exactly_if_kind_and_name_are(certificates: list[Names]) -> None:
    """Whatever the names, their number and their encoding; a certificate without one clear name has no principal."""
    named = {certificate.name: principal_of_pem(certificate.signed()) for certificate in certificates}
    for certificate in certificates:
        assert principal_of_pem(certificate.signed()) == named[certificate.name]
    assert named.pop(None, None) is None
    principals = [principal for principal in named.values() if principal is not None]
    assert len(set(principals)) == len(named)
    for principal in principals:
        assert principal.isascii()
        assert principal.isprintable()
        assert not set(principal) & set(" =,\n")


def test_two_common_names_in_one_part_of_the_subject_are_two() -> None:
    """As ``CN=ops+CN=mallory``."""
    names = [x509.NameAttribute(NameOID.COMMON_NAME, name) for name in ("ops", "mallory")]
    subject = x509.Name([x509.RelativeDistinguishedName(names)])
    assert principal_of_pem(AUTHORITY.of_subject(subject)) is None


@given(NAMES)
def test_a_renewed_certificate_keeps_its_principal(certificate: Names) -> None:
    """With a new serial number and new dates, and from another authority."""
    assert principal_of_pem(certificate.signed(SUCCESSOR)) == principal_of_pem(certificate.signed())


@given(st.data())
def test_a_damaged_certificate_never_raises(data: st.DataObject) -> None:
    """Every error of the parser means no principal."""
    damaged = bytearray(x509.load_pem_x509_certificate(DAMAGED).public_bytes(Encoding.DER))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    principal = principal_of_pem(b"-----BEGIN CERTIFICATE-----\n%s-----END CERTIFICATE-----\n" % encodebytes(damaged))
    assert principal is None or principal.isprintable()


@pytest.mark.parametrize("pem", [b"", b"junk", DAMAGED[:200], b"\0" * 100, DAMAGED.replace(b"CERTIFICATE", b"KEY")])
def test_what_is_not_a_certificate_names_nobody(pem: bytes) -> None:
    """Cut short, of another kind, or not PEM at all."""
    assert principal_of_pem(pem) is None


@dataclass(frozen=True)
class _Connection:
    """What ``CertificateAccess`` looks at of a call."""

    properties: dict[str, list[bytes]]

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return what gRPC reports of the peer."""
        return self.properties


def _admit(access: CertificateAccess, *pems: bytes, **properties: list[bytes]) -> str:
    return access.admit(cast("Any", _Connection({"x509_pem_cert": list(pems), **properties}))).principal


def test_what_grpc_says_of_names_is_not_looked_at() -> None:
    """Its properties end at the first NUL, and they hold one common name; no certificate, nobody."""
    access = CertificateAccess([])
    said = {"x509_common_name": [b"ops"], "peer_uri": [b"spiffe://td/ops"]}
    assert _admit(access, _named("alice"), **said) == "alice"
    for pems in ((), (_named("alice"), _named("alice"))):
        with pytest.raises(TokenInvalid, match="must name one principal"):
            _admit(access, *pems, **said)


def test_no_certificate_has_the_name_of_strangers() -> None:
    """Logs and counters have it for refused callers; the refusal says which name is meant."""
    with pytest.raises(TokenInvalid, match="other than -, the name of strangers"):
        _admit(CertificateAccess([]), _named("-"))


@pytest.mark.parametrize("name", ["alice", "alice\0x"])
def test_each_certificate_is_parsed_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that names nobody: a client that tries again and again costs no parse each time."""
    parsed = _counted(monkeypatch)
    access, pem = CertificateAccess([]), _named(name)
    for _ in range(3):
        _try(access, pem)
    assert parsed == [pem]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In number, the least recently used is forgotten; and in size, a large certificate is parsed each time."""
    parsed = _counted(monkeypatch)
    monkeypatch.setattr(auth, "_MAX_REMEMBERED", 2)
    access = CertificateAccess([])
    first, second, third = (_named(name) for name in ("a", "b", "c"))
    for pem in (first, second, first, third, first, second):
        _try(access, pem)
    assert parsed == [first, second, third, second]
    large = AUTHORITY.of_subject(x509.Name([]), [x509.DNSName(f"{'x' * 50}.{n}.example") for n in range(400)])
    assert len(large) > auth._MAX_REMEMBERED_BYTES
    parsed.clear()
    for _ in range(2):
        _try(access, large)
    assert parsed == [large, large]


def _named(name: str) -> bytes:
    return Names(((name, _ASN1Type.UTF8String),)).signed()


def _try(access: CertificateAccess, pem: bytes) -> None:
    with contextlib.suppress(TokenInvalid):
        _admit(access, pem)


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list that gets every certificate that is parsed from now on."""
    parsed: list[bytes] = []

    def parse(pem: bytes) -> str | None:
        parsed.append(pem)
        return principal_of_pem(pem)

    monkeypatch.setattr(client_certificate, "principal_of_pem", parse)
    return parsed
