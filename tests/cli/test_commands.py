"""The command line, run as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.support.forked_ullage import ROOT, run_ullage
from tests.support.sample_conversations import agent_session

pytestmark = pytest.mark.slow  # it starts a process

HEAVY = ("litellm", "aiohttp", "redis", "tiktoken", "pydantic", "yaml", "rich", "structlog", "prometheus_client")


def run_code(code, *arguments):
    """Run *code* in an interpreter of its own."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_help_imports_nothing_heavy():
    """`ullage --help` answers without importing the server, the settings or anything of their size."""
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('IMPORTED', [m for m in {HEAVY!r} if m in sys.modules]))\n"
        "from proxy.cli import main\nmain()"
    )
    ran = run_code(code, "--help")
    assert ran.returncode == 0, ran.stderr
    assert "IMPORTED []" in ran.stdout
    for command in ("serve", "check", "schema", "models", "fit", "replay", "health"):
        assert command in ran.stdout


def test_serving_imports_nothing_that_only_others_need():
    """What `ullage serve` imports holds no library that is for other upstreams, tokenizers or traces."""
    unneeded = ("litellm", "gigatoken", "numpy", "opentelemetry")
    code = f"import sys\nimport proxy.fleet\nprint('IMPORTED', [m for m in {unneeded!r} if m in sys.modules])"
    ran = run_code(code)
    assert ran.returncode == 0, ran.stderr
    assert "IMPORTED []" in ran.stdout


def test_version_is_shown():
    """`ullage --version` names the program and a version."""
    ran = run_ullage("--version")
    assert ran.returncode == 0
    assert ran.stdout.startswith("ullage 0")


def test_check_accepts_the_example():
    """The shipped example is fine, and what it would serve is summed up."""
    ran = run_ullage("check", "config/ullage.yaml")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "config/ullage.yaml: OK" in ran.stdout
    assert "https://api.openai.com/v1" in ran.stdout


def test_check_says_what_is_wrong(tmp_path):
    """A wrong file gives file, line, key and remedy on standard error, and exit code 1."""
    file = tmp_path / "wrong.yaml"
    file.write_text("server:\n  prot: 1\n  host: 0.0.0.0\n")
    ran = run_ullage("check", str(file))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"{file}:2: server.prot: there is no such key\n    Did you mean 'port'?" in ran.stderr
    assert "1 problem." in ran.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("server: {port: 1}\n", "no upstream is configured"),
        ("server: {host: 0.0.0.0}\nupstreams: [{name: a, base_url: 'http://h', api_key: k}]\n", "access_keys"),
    ],
)
def test_check_refuses_what_serve_would_refuse(tmp_path, text, reason):
    """A file that is valid and yet would not be served does not pass as OK."""
    file = tmp_path / "ullage.yaml"
    file.write_text(text)
    ran = run_ullage("check", str(file))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert reason in ran.stderr


@pytest.mark.parametrize("obstacle", ["a file", "a damaged key"])
def test_check_warns_of_a_store_that_serve_could_not_use(tmp_path, obstacle):
    """A data directory that cannot be used is served from memory: the file is valid, with a warning that says so."""
    data = tmp_path / "data"
    if obstacle == "a file":  # root, too, must fail here
        data.write_text("in the way")
        data /= "below"
    else:
        data.mkdir()
        (data / "master.key").write_bytes(b"short")
    before = sorted(tmp_path.rglob("*"))
    file = tmp_path / "ullage.yaml"
    file.write_text(f"upstreams: [{{name: a, base_url: 'http://h/v1'}}]\nstore: {{path: '{data}'}}\n")
    ran = run_ullage("check", str(file))
    assert ran.returncode == 0
    assert f"{file}: OK" in ran.stdout
    assert f"{file}: warning: " in ran.stderr
    assert str(tmp_path / "data") in ran.stderr
    assert "set store.url to memory" in ran.stderr
    assert sorted(path for path in tmp_path.rglob("*") if path != file) == before
    file.write_text("upstreams: [{name: a, base_url: 'http://h/v1'}]\nstore: {url: memory}\n")
    assert run_ullage("check", str(file)).stderr == ""


def test_schema_is_json_that_refuses_unknown_keys():
    """`ullage schema` prints a JSON Schema whose objects are closed."""
    schema = json.loads(run_ullage("schema").stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["additionalProperties"] is False
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values())


def test_serve_without_an_upstream_tells_the_one_command():
    """With no upstream from anywhere, serve names the command to use and ends with code 2."""
    ran = run_ullage("serve")
    assert ran.returncode == 2
    assert "ullage serve --upstream http://" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_serve_refuses_an_open_address_with_a_key():
    """serve does not hand an upstream's key to whoever reaches the address."""
    environment = {"ULLAGE_UPSTREAMS__A__BASE_URL": "http://127.0.0.1:9/v1", "ULLAGE_UPSTREAMS__A__API_KEY": "CANARY"}
    ran = run_ullage("serve", "--host", "0.0.0.0", environment=environment)
    assert ran.returncode == 1
    assert "server.access_keys" in ran.stderr
    assert "CANARY" not in ran.stdout + ran.stderr


def test_serve_names_the_flag_that_is_wrong():
    """A bad value on the command line is reported as such."""
    ran = run_ullage("serve", "--upstream", "localhost:8000", "--store", "mysql://h")
    assert ran.returncode == 1
    assert "the command line: upstreams[0].base_url: is no http(s) URL" in ran.stderr
    assert "the command line: store.url" in ran.stderr


def test_a_wrong_flag_is_a_usage_error():
    """An unknown option ends with code 2."""
    assert run_ullage("serve", "--prot", "1").returncode == 2


@pytest.fixture
def answering():
    """A function that serves one status on /health/ready and gives the port."""
    servers = []

    def start(status):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status if self.path == "/health/ready" else 404)
                self.end_headers()

            def log_message(self, *arguments):
                return

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return server.server_port

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_health_asks_the_ready_route(answering):
    """Exit code 0 when the proxy is ready, 1 when it is not; the port comes from the environment or the URL."""
    port = answering(200)
    assert run_ullage("health", "--url", f"http://127.0.0.1:{port}").returncode == 0
    environment = {"ULLAGE_SERVER__PORT": str(port), "ULLAGE_SERVER__HOST": "0.0.0.0"}
    assert run_ullage("health", environment=environment).stdout == "ready\n"
    ran = run_ullage("health", "--url", f"http://127.0.0.1:{answering(503)}/")
    assert (ran.returncode, ran.stderr) == (1, "not ready (503)\n")


def test_health_of_nothing():
    """A proxy that does not answer is code 1, an address that is none is code 2, neither with a traceback."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        ran = run_ullage("health", "--url", f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert ran.returncode == 1
    assert "does not answer" in ran.stderr
    bad = run_ullage("health", "--url", "127.0.0.1:8484")
    assert bad.returncode == 2
    assert "Traceback" not in ran.stderr + bad.stderr
    bad = run_ullage("top", "--url", "127.0.0.1:8484")
    assert (bad.returncode, bad.stderr[:13]) == (2, "--url 127.0.0")


def test_models_are_listed_without_a_network():
    """`ullage models` needs no server and no file for a published model; JSON has a member for every column."""
    ran = run_ullage("models", "gpt-5", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    (row,) = json.loads(ran.stdout)
    assert (row["model"], row["context_window"], row["max_input_tokens"], row["max_output_tokens"]) == (
        "gpt-5",
        400_000,
        272_000,
        128_000,
    )
    assert (row["encoding"], row["factor"], row["window_from"]) == ("o200k_base", 1.0, "table")
    assert (row["age_seconds"], row["output_from"], row["encoding_from"]) == (None, "table", "family")


def test_models_are_shown_as_a_table():
    """The table has a line for every configured rule, unfolded in a pipe; an unreachable server is reported."""
    ran = run_ullage("models", "--wide", "--upstream", "http://127.0.0.1:1/v1")
    assert ran.returncode == 0
    header, line = ran.stdout.splitlines()
    figures = ["model", "upstream", "window", "input", "output", "encoding", "factor"]
    origins = ["window", "from", "age", "output", "from", "encoding", "from", "factor", "from"]
    assert header.split() == [*figures, *origins, "counted", "by"]
    assert line.split()[:8] == ["*", "upstream", "-", "-", "-", "o200k_base", "1.0", "unknown"]
    assert line.split()[8:-1] == ["-", "unknown", "family", "default"]
    assert line.split()[-1] in ("tiktoken", "gigatoken")
    assert "could not be reached" in ran.stderr


def test_models_with_nothing_to_list(tmp_path):
    """With nothing configured and no pattern, and with a pattern nothing matches, the message says how to go on."""
    ran = run_ullage("models")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "--upstream" in ran.stderr
    ran = run_ullage("models", "no-such-*")
    assert ran.returncode == 1
    assert "no-such-*" in ran.stderr
    ran = run_ullage("models", "--config", str(tmp_path / "none.yaml"))
    assert ran.returncode == 1


def past(folder, rounds=12):
    file = folder / "past.jsonl"
    file.write_text(json.dumps({"id": "one", "model": "gpt-4o", "messages": agent_session(rounds, 300)}))
    return file


def test_replay_shows_what_would_have_become_of_past_conversations(tmp_path):
    """`ullage replay` prints the total and a row for each conversation, and writes the requested picture and page."""
    picture, page = tmp_path / "p.png", tmp_path / "p.html"
    ran = run_ullage("replay", str(past(tmp_path)), "--window", "4096", "--plot", str(picture), "--html", str(page))
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("1 conversation, ")
    heading, row = lines[6:8]
    assert heading.split()[:3] == ["conversation", "requests", "fitted"]
    assert row.split()[0] == "one"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in page.read_text()
    listed = json.loads(run_ullage("replay", str(past(tmp_path)), "--window", "4096", "--json").stdout)
    assert [(each["name"], each["model"], each["window"]) for each in listed["conversations"]] == [
        ("one", "gpt-4o", 4096)
    ]


def test_replay_reports_what_is_missing(tmp_path):
    """A missing file, one without conversations and an impossible path of the picture have their own messages."""
    ran = run_ullage("replay", str(tmp_path / "none.jsonl"))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "No such file" in ran.stderr
    (tmp_path / "empty.jsonl").write_text("{}\n")
    ran = run_ullage("replay", str(tmp_path / "empty.jsonl"))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "no conversation found" in ran.stderr
    unknown = tmp_path / "unknown.jsonl"
    unknown.write_text(json.dumps({"model": "unknown-model", "messages": agent_session(2, 10)}))
    ran = run_ullage("replay", str(unknown))
    assert ran.returncode == 1
    assert "its window is not known: give --window" in ran.stdout
    ran = run_ullage("replay", str(past(tmp_path, 2)), "--window", "4096", "--plot", str(tmp_path / "no" / "p.png"))
    assert ran.returncode == 2
    assert "cannot be written" in ran.stderr


def test_replay_says_how_many_lines_it_left_out(tmp_path):
    """Damaged lines are counted on standard error and in the JSON, and cost nothing else."""
    file = past(tmp_path, 2)
    file.write_text('{"messages": [{"ro\n' + file.read_text() + "\n{broken\n")
    (tmp_path / "cut.json").write_text('{"messages": [')
    ran = run_ullage("replay", str(tmp_path), "--window", "4096", "--json")
    assert ran.returncode == 0
    assert ran.stderr == "3 lines of 2 files are no JSON and were left out: past.jsonl (2), cut.json (1).\n"
    listed = json.loads(ran.stdout)
    assert (listed["total"]["conversations"], listed["broken_lines"]) == (1, {"past.jsonl": 2, "cut.json": 1})
    ran = run_ullage("replay", str(tmp_path / "cut.json"))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("1 line of 1 file is no JSON and was left out: cut.json (1).\n")
    for number in range(7):
        (tmp_path / f"{number}.jsonl").write_text("{broken")
    assert (
        "0.jsonl (1), 1.jsonl (1), 2.jsonl (1), 3.jsonl (1) and 4 more." in run_ullage("replay", str(tmp_path)).stderr
    )


LONG = {
    "model": "gpt-4o-mini",
    "messages": [
        {"role": "user" if at % 2 == 0 else "assistant", "content": f"{at}: " + "some words " * 40} for at in range(41)
    ],
}


def test_fit_prints_the_view_and_nothing_else(tmp_path):
    """The view alone is on standard output, as bytes of one JSON document; the same from standard input."""
    file = tmp_path / "request.json"
    file.write_text(json.dumps(LONG))
    ran = run_ullage("fit", str(file), "--window", "2048")
    assert (ran.returncode, ran.stderr) == (0, "")
    view = json.loads(ran.stdout)
    assert view["messages"][-1] == LONG["messages"][-1]
    assert len(view["messages"]) < len(LONG["messages"])
    config = tmp_path / "ullage.yaml"
    config.write_text("models: [{name: '*', context_window: 2048}]\n")
    piped = run_ullage("fit", "-", "--config", str(config), stdin=file)
    assert piped.stdout == ran.stdout


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_fit_and_replay_read_what_windows_writes(tmp_path, encoding):
    """A byte order mark, or UTF-16, is no reason to refuse a file."""
    file = tmp_path / "request.json"
    file.write_bytes(json.dumps(LONG).encode(encoding))
    ran = run_ullage("fit", str(file), "--window", "200000")
    assert (ran.returncode, json.loads(ran.stdout)) == (0, LONG), ran.stderr
    ran = run_ullage("replay", str(file), "--window", "2048")
    assert ran.returncode == 0, ran.stderr


def test_fit_explains(tmp_path):
    """With --explain there are tables in place of the view."""
    file = tmp_path / "request.json"
    file.write_text(json.dumps(LONG))
    ran = run_ullage("fit", str(file), "--window", "2048", "--explain")
    assert ran.returncode == 0, ran.stderr
    for word in ("2,048  (configured)", "region", "summary", "kind", "stage", "fold"):
        assert word in ran.stdout
    page = tmp_path / "fit.html"
    ran = run_ullage("fit", str(file), "--window", "2048", "--html", str(page))
    assert (ran.returncode, ran.stdout) == (0, "")
    assert "<svg" in page.read_text()
    ran = run_ullage("fit", str(file), "--window", "2048", "--html", str(tmp_path / "no" / "fit.html"))
    assert ran.returncode == 2
    assert "cannot be written" in ran.stderr


def test_fit_refuses_with_a_sentence(tmp_path):
    """A request that cannot fit ends with the refusal's own words and exit code 1, an unreadable one with its name."""
    file = tmp_path / "request.json"
    file.write_text(json.dumps({**LONG, "messages": [{"role": "system", "content": "word " * 3000}]}))
    for explain in ((), ("--explain",)):
        ran = run_ullage("fit", str(file), "--window", "2048", *explain)
        assert ran.returncode == 1
        assert ran.stderr.startswith(f"{file}: This model's maximum context length is 2048 tokens.")
        assert bool(ran.stdout) == bool(explain)
    file.write_text(json.dumps({**LONG, "model": "named-in-the-request"}))
    unknown = run_ullage("fit", str(file), "--model", "given-beside-it")
    assert "given-beside-it" in unknown.stderr
    assert "named-in-the-request" not in unknown.stderr
    gone = run_ullage("fit", str(tmp_path / "gone.json"))
    assert gone.returncode == 2
    assert "gone.json: cannot be read: No such file" in gone.stderr
    file.write_text("nothing")
    assert run_ullage("fit", str(file)).stderr.startswith(f"{file}: is no JSON")
