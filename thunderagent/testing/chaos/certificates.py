"""TLS for 127.0.0.1 with certificates that are made when they are needed."""

from __future__ import annotations

import functools
import ipaddress
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from thunderagent.model.errors import ConfigurationError

_USAGES: Final = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


class Contexts(NamedTuple):
    good: ssl.SSLContext
    """For a server; `client` trusts it."""
    untrusted: ssl.SSLContext
    """For a server; its certificate is signed by an unknown authority."""
    client: ssl.SSLContext


@functools.cache
def contexts() -> Contexts:
    """The contexts, made once in a process; the certificates are good for 30 days.

    Raises:
        ConfigurationError: the package `cryptography` is missing.
    """
    known, good = _server_context("chaos authority")
    _, untrusted = _server_context("unknown authority")
    client = ssl.create_default_context(cadata=known)
    return Contexts(good, untrusted, client)


def _server_context(authority: str) -> tuple[str, ssl.SSLContext]:
    """The certificate of a new authority, and a context with a certificate that it signed."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigurationError(
            "a chaos server with TLS makes its certificates with the package cryptography; "
            "install it with: pip install cryptography"
        ) from error
    now = datetime.now(UTC)
    issuer_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, authority)])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])

    def signed(name: x509.Name, public: Any, *, is_authority: bool) -> x509.Certificate:
        usage = dict.fromkeys(_USAGES, False)
        usage |= {"key_cert_sign": True} if is_authority else {"digital_signature": True}
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        )
        if not is_authority:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(issuer_key, hashes.SHA256())

    pem = serialization.Encoding.PEM
    root = signed(issuer, issuer_key.public_key(), is_authority=True).public_bytes(pem).decode()
    leaf = signed(subject, key.public_key(), is_authority=False).public_bytes(pem)
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        chain = Path(folder, "chain.pem")
        chain.touch(mode=0o600)
        chain.write_bytes(private + leaf)
        context.load_cert_chain(chain)
    return root, context
