"""A server's key and certificate."""

import ipaddress
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def self_signed(folder):
    """The path of a file with a key and a self-signed certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8
    path = folder / "both.pem"
    path.write_bytes(key.private_bytes(pem, plain, serialization.NoEncryption()) + certificate.public_bytes(pem))
    return path
