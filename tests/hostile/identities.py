"""Certificates of a trusted authority with names that can be taken for others'."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from ferrule.v1 import executor_pb2
from tests.api.certificates import Authority, Identity, ServerFiles
from tests.hostile.servers import serving, stub_of
from tests.hostile.verdicts import Attack, Campaign, Outcome

ADMIN = "ops"
HOSTILE: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "NUL in the common name": (["ops\0x"], []),
    "NUL and a domain": (["ops\0.evil.example"], []),
    "NUL in a URI": (["x"], ["spiffe://td/a\0b"]),
    "two common names": (["ops", "mallory"], []),
    "two common names, reversed": (["mallory", "ops"], []),
}
"""Common names and URIs of each certificate; each must be refused with UNAUTHENTICATED."""


def identity(authority: Authority, common_names: Sequence[str], uris: Sequence[str]) -> Identity:
    """Return a certificate with these names, signed by an authority that does not look at them."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in common_names])
    names = [x509.UniformResourceIdentifier(uri) for uri in uris]
    cert = authority._sign(key.public_key(), subject, dt.timedelta(days=1), names)
    return Identity(cert, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def taken_for(target: str, root: bytes, client: Identity) -> str:
    """Return who the server takes a client for, or the status that it is refused with."""
    credentials = grpc.ssl_channel_credentials(root, client.key, client.cert)
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(target, credentials, options) as channel:
        try:
            reply = stub_of(channel).GetCapabilities(executor_pb2.GetCapabilitiesRequest(), timeout=10)
        except grpc.RpcError as error:
            return str(error.code().name)
    caller = reply.capabilities.caller
    return f"{caller.principal!r} admin={caller.is_admin}"


def run_certificates(campaign: Campaign) -> Outcome:
    """Connect with each certificate to a server with mutual TLS."""
    authority = Authority()
    files = ServerFiles(_folder(campaign.folder))
    files.write(authority.server(), authority.cert)
    cert, key, ca = files.paths
    arguments = (f"--tls-cert={cert}", f"--tls-key={key}", f"--tls-client-ca={ca}", f"--admins={ADMIN}")
    with serving(campaign, "certificates", *arguments, base=("--executor=paged-reference",)) as server:
        answers = {
            name: taken_for(server.target, authority.cert, identity(authority, *names))
            for name, names in HOSTILE.items()
        }
        honest = taken_for(server.target, authority.cert, authority.client(ADMIN))
    num_taken = sum("admin=" in answer for answer in answers.values())
    figures = {**answers, "honest": honest}
    is_met = num_taken == 0 and honest == f"{ADMIN!r} admin=True"
    summary = f"{num_taken} of {len(answers)} hostile certificates let in"
    return Outcome(summary, figures, "none let in, the honest one let in", is_met)


def _folder(parent: Path) -> Path:
    folder = parent / "certificates"
    folder.mkdir(exist_ok=True)
    return folder


ATTACKS = [Attack("certificates", "a certificate names one principal, and none is taken for another", run_certificates)]
