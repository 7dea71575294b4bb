"""Reads the principal from a verified client certificate.

gRPC reports the names of a certificate as C strings, and only the first common name. A name that contains NUL, or a
second common name, would therefore pass for another principal. This module parses the certificate itself.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from cryptography import x509
from cryptography.x509.oid import NameOID

_LOG = logging.getLogger(__name__)

MAX_NAME_BYTES: Final = 512
"""Longest name in a certificate, in bytes of UTF-8."""

_SAFE_IN_NAMES: Final = "/@.-_~+"
_SAFE_IN_URIS: Final = f"{_SAFE_IN_NAMES}:"
_CONTROL: Final = "Cc"  # the Unicode category of C0, DEL and C1
_UNICODE_TAGS: Final = (12, 28, 30)  # UTF8String, UniversalString, BMPString
_COMMON_NAME_IN_DER: Final = bytes.fromhex("0603550403")


def principal_of_pem(pem: bytes) -> str | None:
    """Return the principal that a client certificate names, or None if it does not name exactly one.

    The name is the one URI among the subject alternative names (a SPIFFE ID is one). If there is no URI, it is the one
    common name of the subject. Names are compared exactly: there is no Unicode normalization and no change of case.
    Unusual characters are percent-encoded, so that different names never give equal principals. A colon is encoded in
    common names only, and every URI has one, so a common name never equals a URI.

    Args:
        pem: The certificate, whose signature and dates have already been verified.
    """
    try:
        return _principal_of(x509.load_pem_x509_certificate(pem))
    except Exception as error:  # noqa: BLE001  (a certificate that cannot be parsed in full names nobody)
        _LOG.debug("client certificate not usable: %s", type(error).__name__)
        return None


def _principal_of(certificate: x509.Certificate) -> str:
    """Return the principal of a parsed certificate.

    Raises:
        ValueError: It names no principal, or several.
    """
    uris = _uris_of(certificate)
    if not uris:
        return quote(_checked(_common_names_of(certificate)), _SAFE_IN_NAMES)
    uri = _checked(uris)
    if ":" not in uri or not uri.isascii():
        raise ValueError("not a URI")
    return quote(uri, _SAFE_IN_URIS)


def _uris_of(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _common_names_of(certificate: x509.Certificate) -> list[str]:
    return [_text_of(attribute) for attribute in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]


def _text_of(attribute: x509.NameAttribute[str | bytes]) -> str:
    """Return the text of a common name.

    The parser decodes every string type as UTF-8 except UniversalString and BMPString, although other programs decode
    T61String differently. Characters outside ASCII are therefore accepted only in types that define them.
    """
    text = attribute.value
    encoded = x509.Name([attribute]).public_bytes()
    tag = encoded.partition(_COMMON_NAME_IN_DER)[2][0]
    if not isinstance(text, str) or not (text.isascii() or tag in _UNICODE_TAGS):
        raise ValueError("the encoding of the common name is ambiguous")
    return text


def _checked(names: Sequence[str]) -> str:
    """Return the one name, which is not empty, not too long, and has no control characters."""
    if len(names) != 1 or not 1 <= len(names[0].encode()) <= MAX_NAME_BYTES:
        raise ValueError("not one name of a usable length")
    if any(unicodedata.category(character) == _CONTROL for character in names[0]):
        raise ValueError("control characters")
    return names[0]
