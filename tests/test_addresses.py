"""Addresses on which a proxy listens."""

from __future__ import annotations

import pytest

from proxy.addresses import bracketed, is_loopback, local_address, without_version


def test_addresses_of_the_sixth_version_stand_in_brackets() -> None:
    """A URL needs them."""
    assert (bracketed("::1"), bracketed("h")) == ("[::1]", "h")


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:8484"),
        ("0.0.0.0", "http://127.0.0.1:8484"),
        ("::", "http://[::1]:8484"),
        ("fe80::1", "http://[fe80::1]:8484"),
        ("example.test", "http://example.test:8484"),
    ],
)
def test_the_address_for_clients_on_this_machine(host: str, address: str) -> None:
    """Nobody can connect to the addresses for all interfaces."""
    assert local_address(host, 8484) == address


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "[::1]", "::1%lo", "::ffff:127.0.0.1", "LocalHost"])
def test_what_only_this_machine_reaches(host: str) -> None:
    """Also in brackets, with a zone, and an IPv4 address on a socket of both versions."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "example.test", ""])
def test_what_others_may_reach(host: str) -> None:
    """Any name but localhost may be an address of the network."""
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:1/v1/", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        ("http://h:1/", "http://h:1"),
        ("http://h/base/v1", "http://h/base"),
        ("/v1/", ""),
        ("", ""),
    ],
)
def test_the_address_of_a_base_url(url: str, root: str) -> None:
    """Clients have it with the version, and commands take it from them."""
    assert without_version(url) == root
