"""The examples of `config/examples/`, started or linted as far as a machine without containers can."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from proxy.features.settings import AllSettings
from proxy.settings import load
from proxy.upstream.litellm import OFFLINE
from tests.conftest import StartProxy, StartStub
from tests.e2e.test_compress import GATEWAY, gateway
from tests.features.compress.test_feature import conversation
from tests.helm.test_chart import documents, needs_helm
from tests.support.loopback import loopback_client
from tests.support.ports import free_port
from tests.support.proxy_process import ROOT, Proxy, until
from tests.support.valkey_groups import six_nodes

EXAMPLES = ROOT / "config" / "examples"
KEYS = {
    "ULLAGE_ACCESS_KEY": "sk-access-0123456789",
    "ULLAGE_ACCESS_KEYS": "sk-access-0123456789",
    "ULLAGE_STORE_KEY": "store-key-0123456789",
    "VLLM_KEY": "sk-vllm-0123456789",
    "OPENAI_API_KEY": "sk-openai-0123456789",
    "LITELLM_MASTER_KEY": "sk-litellm-0123456789",
}
CONFIGURATIONS = sorted(
    path
    for path in EXAMPLES.rglob("*.yaml")
    if path.name in ("ullage.yaml", "proxy.yaml") and "kind:" not in path.read_text()
)


def read(*names: str) -> Any:
    return yaml.safe_load(EXAMPLES.joinpath(*names).read_text())


def test_every_example_is_on_its_page() -> None:
    """`docs/examples.md` leads to each folder."""
    page = (ROOT / "docs" / "examples.md").read_text()
    folders = {path.name for path in EXAMPLES.iterdir()}
    assert folders == set(re.findall(r"\]\(\.\./config/examples/([\w-]+)/?\)", page))


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_configurations_are_valid(path: Path) -> None:
    """Each one loads, given the variables that it names, and is served."""
    assert load(path, {}, KEYS, AllSettings).upstreams
    assert len(CONFIGURATIONS) == 6


def test_the_composition_hangs_together() -> None:
    """Names, ports and files that one part uses are those of another; nothing listens beyond this machine."""
    services = read("compose", "compose.yaml")["services"]
    found = load(EXAMPLES / "compose" / "ullage.yaml", {}, KEYS, AllSettings)
    addresses = [found.upstreams[0].base_url, str(found.store.url)]
    ports = {"llama": "8080", "valkey": "6379"}
    assert [re.search(r"//(\w+):(\d+)", address).groups() for address in addresses] == list(ports.items())  # type: ignore[union-attr]
    assert services["llama"]["command"][services["llama"]["command"].index("--port") + 1] == ports["llama"]
    for service in services.values():
        assert set(service.get("depends_on", {})) <= services.keys()
        assert all(services[name]["healthcheck"] for name in service.get("depends_on", {}))
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        sources = [volume.split(":")[0] for volume in service.get("volumes", ())]
        assert all((EXAMPLES / "compose" / source).exists() for source in sources if source != "./models")
    ullage = services["ullage"]
    assert (EXAMPLES / "compose" / ullage["build"] / "Dockerfile").exists()
    assert f":{found.server.port}:{found.server.port}" in ullage["ports"][0]
    assert int(ullage["stop_grace_period"].removesuffix("s")) > found.server.drain


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_has_no_findings(tmp_path: Path) -> None:
    """systemd knows every line of it."""
    unit = tmp_path / "ullage.service"
    text = (EXAMPLES / "systemd" / "ullage.service").read_text()
    unit.write_text(text.replace("/opt/ullage/bin/ullage", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    drain = load(EXAMPLES / "systemd" / "ullage.yaml", {}, KEYS, AllSettings).server.drain
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0]) > drain


def merged(base: Any, patch: Any) -> Any:
    """*base* with *patch* as Kubernetes merges them: objects by member, lists by the name of their entries."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{name: merged(base.get(name), value) for name, value in patch.items()}}
    if isinstance(base, list) and isinstance(patch, list):
        by_name = {entry["name"]: entry for entry in base}
        return list(
            {**by_name, **{entry["name"]: merged(by_name.get(entry["name"]), entry) for entry in patch}}.values()
        )
    return patch


def test_the_sidecar_makes_a_whole_pod() -> None:
    """The patched Deployment is one of Kubernetes', and what is mounted and generated is there."""
    kustomization = read("sidecar", "kustomization.yaml")
    (resource,), (patch,) = kustomization["resources"], kustomization["patches"]
    whole = merged(read("sidecar", resource), read("sidecar", patch["path"]))
    kubernetes_validate.validate(whole, "1.29", strict=True)
    pod = whole["spec"]["template"]["spec"]
    (application,), (ullage,) = pod["containers"], pod["initContainers"]
    assert application["image"].startswith("registry.example.com/application")
    assert {mount["name"] for mount in ullage["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (generated,) = kustomization["configMapGenerator"]
    file = generated["files"][0].partition("=")[2]
    assert pod["volumes"][0]["configMap"]["name"] == generated["name"]
    assert load(EXAMPLES / "sidecar" / file, {}, {}, AllSettings).server.drain < pod["terminationGracePeriodSeconds"]


@needs_helm
def test_the_chart_takes_the_application_along() -> None:
    """The values render, with the application beside the proxy."""
    manifests = documents(read("sidecar", "values.yaml"))
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    assert [container["name"] for container in pod["containers"]] == ["ullage", "application"]
    kubernetes_validate.validate(manifests["Deployment"], "1.29", strict=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
async def test_litellm_in_front(stub: StartStub, proxy: StartProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM's router, with the example's list of models, is answered through a proxy with the example's settings."""
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    litellm = importlib.import_module("litellm")
    caching = importlib.import_module("litellm.caching.llm_caching_handler")
    monkeypatch.setattr(litellm, "in_memory_llm_clients_cache", caching.LLMClientCache())
    server = await stub(window=32_768)
    config = read("litellm-in-front", "ullage.yaml")
    config["upstreams"][0]["base_url"] = server.url
    front = await proxy(server.url, config=config, environment=KEYS)
    (model,) = read("litellm-in-front", "litellm.yaml")["model_list"]
    assert model["litellm_params"]["api_base"] == "http://127.0.0.1:8484/v1"
    model["litellm_params"] |= {"api_base": front.url, "api_key": KEYS["ULLAGE_ACCESS_KEY"]}
    router = litellm.Router(model_list=[model], num_retries=0)
    async with loopback_client() as client:
        # Not the one that a test of the bridge may have left in this process.
        monkeypatch.setattr(litellm, "aclient_session", client)
        answer = await router.acompletion(model="qwen", messages=conversation(200))
    assert answer.choices[0].message.content == "Understood."
    assert [seen.verdict for seen in server.chats()] == ["ok"]


async def test_litellm_behind(stub: StartStub, proxy: StartProxy) -> None:
    """What LiteLLM's proxy would be sent has its key and its name of the model."""
    server = await stub(window=200_000)
    config = read("litellm-behind", "ullage.yaml")
    (model,) = read("litellm-behind", "litellm.yaml")["model_list"]
    config["upstreams"][0]["base_url"] = server.url
    front = await proxy(server.url, config=config, environment=KEYS)
    async with loopback_client() as client:
        body = {"model": model["model_name"], "messages": conversation(2)}
        answer = await client.post(f"{front.url}/chat/completions", json=body)
    assert answer.headers["x-ullage-window"] == "200000"
    (seen,) = server.chats()
    assert (seen.parsed["model"], seen.header("authorization")) == ("claude", f"Bearer {KEYS['LITELLM_MASTER_KEY']}")


MASTER_KEY = "sk-" + "0f" * 32
"""LiteLLM's proxy does not start with a weak one."""


@pytest.fixture
def keys_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**KEYS, "LITELLM_MASTER_KEY": MASTER_KEY, "ANTHROPIC_API_KEY": "sk-ant"}.items():
        monkeypatch.setenv(name, value)


async def answered(base_url: str, model: str, key: str) -> str:
    """The text of an answer to a conversation that is too long for any window here."""
    async with loopback_client() as client:
        body = {"model": model, "messages": conversation(400), "max_tokens": 500}
        answer = await client.post(
            f"{base_url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        )
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_the_gateways_have_a_master_key() -> None:
    """LiteLLM's proxy refuses to start without one."""
    for name in ("litellm-in-front", "litellm-behind"):
        assert read(name, "litellm.yaml")["general_settings"]["master_key"] == "os.environ/LITELLM_MASTER_KEY"


@pytest.mark.skipif(not GATEWAY, reason="ULLAGE_LITELLM is not set")
async def test_the_real_gateway_in_front(
    stub: StartStub, proxy: StartProxy, home: Path, keys_of_the_gateway: None
) -> None:
    """Both proxies start from the folder's files, and what is too long is answered."""
    server = await stub(window=32_768)
    config, litellm = read("litellm-in-front", "ullage.yaml"), read("litellm-in-front", "litellm.yaml")
    config["upstreams"][0]["base_url"] = server.url
    front = await proxy(server.url, config=config, environment=KEYS)
    litellm["model_list"][0]["litellm_params"]["api_base"] = front.url
    async with gateway(home, litellm) as url:
        assert await answered(url, "qwen", MASTER_KEY) == "Understood."
    assert [seen.verdict for seen in server.chats()] == ["ok"]


@pytest.mark.skipif(not GATEWAY, reason="ULLAGE_LITELLM is not set")
async def test_the_real_gateway_behind(
    stub: StartStub, proxy: StartProxy, home: Path, keys_of_the_gateway: None
) -> None:
    """Both proxies start from the folder's files, and what is too long is answered by the provider behind them."""
    server = await stub(window=20_000, wording="anthropic")
    config, litellm = read("litellm-behind", "ullage.yaml"), read("litellm-behind", "litellm.yaml")
    litellm["model_list"][0]["litellm_params"]["api_base"] = server.root
    async with gateway(home, litellm) as url:
        config["upstreams"][0]["base_url"] = url
        config["models"][0]["context_window"] = 20_000
        front = await proxy(url, config=config, environment={**KEYS, "LITELLM_MASTER_KEY": MASTER_KEY})
        assert await answered(front.url, "claude", "sk-client") == "Understood."
    assert [(seen.path, seen.verdict) for seen in server.chats()] == [("/v1/messages", "ok")]


class Balancer:
    """Leads to the replicas in service: haproxy with the example's file if it is installed, else by turns."""

    def __init__(self, replicas: dict[str, Proxy], home: Path) -> None:
        self._replicas, self._home, self._turn = replicas, home, 0
        self._serving = set(replicas)
        self._process: subprocess.Popen[bytes] | None = None
        self._port = free_port()

    @property
    def address(self) -> str:
        if self._process is not None:
            return f"http://127.0.0.1:{self._port}"
        self._turn += 1
        names = sorted(self._serving)
        return self._replicas[names[self._turn % len(names)]].root

    async def start(self) -> None:
        binary = shutil.which("haproxy")
        if binary is None:
            return
        text = (EXAMPLES / "fleet" / "haproxy.cfg").read_text()
        text = text.replace("/run/haproxy/admin.sock", str(self._home / "admin.sock"))
        text = text.replace("maxconn 20000", "maxconn 500")
        text = text.replace("bind :8080", f"bind 127.0.0.1:{self._port}")
        for name, replica in self._replicas.items():
            text = re.sub(rf"server {name} \S+", f"server {name} 127.0.0.1:{replica.port}", text)
        file = self._home / "haproxy.cfg"
        file.write_text(text)
        self._process = await asyncio.to_thread(subprocess.Popen, [binary, "-f", file])
        await until(self._is_up)

    def take_out(self, name: str) -> None:
        """Send the replica called *name* nothing more."""
        self._serving.discard(name)
        assert self._say(f"set server ullage/{name} state drain").strip() == ""

    async def take_in(self, name: str) -> None:
        """Return once the replica called *name* is sent requests again."""
        assert self._say(f"set server ullage/{name} state ready").strip() == ""
        await until(lambda: self._process is None or f"\nullage,{name},UP" in self._states())
        self._serving.add(name)

    def _states(self) -> str:
        """Each server with its state, a line each."""
        rows = [line.split(",") for line in self._say("show stat").splitlines()]
        return "\n" + "\n".join(",".join([row[0], row[1], row[17]]) for row in rows if len(row) > 17)

    def _say(self, command: str) -> str:
        """The answer to a *command* of the example's head; empty without haproxy."""
        if self._process is None:
            return ""
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(self._home / "admin.sock"))
            admin.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: admin.recv(65536), b"")).decode()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _is_up(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0


@asynccontextmanager
async def under_load(balancer: Balancer, failed: list[str]) -> AsyncIterator[list[int]]:
    """Three callers, of whom each has a conversation that grows over its window; yields the counts of their answers."""
    answered = [0, 0, 0]

    async def call(number: int) -> None:
        headers = {"authorization": f"Bearer {KEYS['ULLAGE_ACCESS_KEYS']}", "x-ullage-conversation": str(number)}
        async with loopback_client(headers=headers) as client:
            while True:
                body = {"model": "m", "messages": conversation(20 + answered[number] // 4), "stream": number == 0}
                try:
                    answer = await client.post(f"{balancer.address}/v1/chat/completions", json=body)
                except httpx.TransportError as error:
                    failed.append(repr(error))
                    continue
                if answer.status_code != 200 or (number == 0 and b"[DONE]" not in answer.content):
                    failed.append(answer.text)
                answered[number] += 1
                await asyncio.sleep(0.05)

    running = [asyncio.ensure_future(call(number)) for number in range(3)]
    yield answered
    for each in running:
        each.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_a_fleet_is_restarted_and_changed_without_a_failed_request(
    stub: StartStub, home: Path, proxy: StartProxy
) -> None:
    """Replica by replica, and with another policy meanwhile: every request is answered, and every view fits."""
    server = await stub(window=8_192)
    async with six_nodes(home) as nodes:
        config = read("fleet", "ullage.yaml")
        assert str(config["store"]["url"]).count(",") + 1 == len(nodes)
        config["store"]["url"] = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        config["upstreams"][0]["base_url"] = server.url
        config["models"][0]["context_window"] = 8_192
        config |= {"summaries": {"mode": "off"}, "server": {"access_keys": config["server"]["access_keys"]}}
        for name in "abc":
            (home / name).mkdir()
        starts = (proxy(server.url, config=config, home=home / name, environment=KEYS) for name in "abc")
        replicas = dict(zip("abc", await asyncio.gather(*starts), strict=True))
        balancer = Balancer(replicas, home)
        failed: list[str] = []
        await balancer.start()
        try:
            async with under_load(balancer, failed) as answered:
                await until(lambda: min(answered) > 3, 60)
                for name, replica in replicas.items():
                    balancer.take_out(name)
                    await asyncio.sleep(0.2)  # what was on its way to it arrives
                    assert await asyncio.to_thread(replica.end) == 0
                    await replica.start()
                    await balancer.take_in(name)
                for name in replicas:
                    file = home / name / "ullage.yaml"
                    fresh = file.with_suffix(".new")
                    fresh.write_text(file.read_text() + "compression: {high_mark: 0.85, low_mark: 0.3}\n")
                    os.replace(fresh, file)
                await until(lambda: all("config.changed" in each.log.read_text() for each in replicas.values()), 60)
                before = min(answered)
                await until(lambda: min(answered) > before + 2, 60)
        finally:
            balancer.end()
    assert failed == []
    assert {seen.verdict for seen in server.chats()} == {"ok"}
