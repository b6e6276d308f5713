"""Imports of a starting server, and the certificates that they postpone."""

import asyncio
import ssl
import subprocess
import sys

import pytest

from tests.support.certificates import self_signed
from tests.support.loopback import loopback_client
from tests.support.proxy_process import Proxy
from tests.support.server_fixture import ScriptedServer, raw_answer

LEAN = """
import gc, ssl, sys
from proxy.imports import lacks_certificates, lean_imports, read_certificates

with lean_imports():
    assert not gc.isenabled()
    import aiohttp.connector
    import structlog
context = aiohttp.connector._SSL_CONTEXT_VERIFIED
facts = [gc.isenabled(), "rich" in sys.modules, lacks_certificates(), context.cert_store_stats()["x509"]]
read_certificates()
import rich
print(*facts, lacks_certificates(), context.cert_store_stats()["x509"])
"""


def test_lean_imports_postpone_certificates_and_leave_rich_out(tmp_path):
    """aiohttp's contexts get their certificates later, and rich can be imported afterwards."""
    environment = {"PYTHONPATH": ":".join(sys.path), "SSL_CERT_FILE": str(self_signed(tmp_path))}
    done = subprocess.run(
        [sys.executable, "-c", LEAN], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "False", "True", "0", "False", "1"]


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_an_upstream_with_tls_is_trusted_by_the_authorities_certificates(tmp_path, workers):
    """A started server reads the postponed certificates before its first call: several at once are answered."""
    stage, certificate = ScriptedServer(), self_signed(tmp_path)
    stage.reply = raw_answer(b"{}")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    server = await asyncio.start_server(stage.serve, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    arguments, environment = ("--workers", workers), {"SSL_CERT_FILE": str(certificate)}
    async with Proxy(url, window=4096, arguments=arguments, environment=environment, under=("env",)) as proxy:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        async with loopback_client(timeout=60) as client:
            calls = (client.post(f"{proxy.url}/chat/completions", json=body) for _ in range(4))
            answers = await asyncio.gather(*calls)
    assert [answer.status_code for answer in answers] == [200] * 4
    server.close()
