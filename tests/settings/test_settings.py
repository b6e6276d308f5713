"""The shape: defaults, the example, references, and when keys would be offered to strangers."""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import proxy
from proxy.features.settings import AllSettings
from proxy.settings import SettingsError, load, open_proxy_problem, serving_problem
from tests.support.settings_files import EXAMPLE, problems, write_settings


def test_the_example_is_the_defaults():
    """The commented example loads as it is and sets every key to its default."""
    example = load(EXAMPLE, {}, {}, AllSettings)
    upstreams = [{"name": "openai", "base_url": "https://api.openai.com/v1"}]
    assert example == load(None, {("upstreams",): upstreams, ("models",): [{"name": "*"}]}, {}, AllSettings)


def keys(schema, definitions, path=()):
    for branch in schema.get("anyOf", ()):
        yield from keys(branch, definitions, path)
    if "$ref" in schema:
        yield from keys(definitions[schema["$ref"].rpartition("/")[2]], definitions, path)
    if isinstance(schema.get("items"), dict):
        yield from keys(schema["items"], definitions, path)
    for name, inner in schema.get("properties", {}).items():
        yield (*path, name)
        yield from keys(inner, definitions, (*path, name))


def test_the_example_shows_every_key_of_the_schema():
    """A key that can be set is explained in the example, and nothing else is."""
    import yaml

    def spelt(value, path=()):
        if isinstance(value, list):
            for entry in value:
                yield from spelt(entry, path)
        elif isinstance(value, dict):
            for name, inner in value.items():
                yield (*path, name)
                yield from spelt(inner, (*path, name))

    schema = AllSettings.model_json_schema()
    entries = {("models", "overflow", "fallback")}  # these lists are empty by default
    entries |= {("overflow_rules", name) for name in ("means", "phrase", "code", "source")}
    declared = set(keys(schema, schema["$defs"])) - entries
    assert all(f"{path[-1]}: " in EXAMPLE.read_text() for path in entries)
    assert set(spelt(yaml.safe_load(EXAMPLE.read_text()))) == declared
    assert ("server", "limits", "body") in declared
    assert json.dumps(schema)


@pytest.mark.parametrize(
    ("host", "extra", "refused"),
    [
        ("127.0.0.1", "", False),
        ("localhost", "", False),
        ("::1", "", False),
        ("::ffff:127.0.0.1", "", False),
        ("0.0.0.0", "", True),
        ("::", "", True),
        ("proxy.example.org", "", True),
        ("0.0.0.0", ", access_keys: [k]", False),
        ("0.0.0.0", ", open: true", False),
    ],
)
def test_upstream_keys_are_not_offered_to_strangers(tmp_path, host, extra, refused):
    """An address others can reach, an upstream key and no access key: refused, unless server.open insists."""
    text = f"server: {{host: '{host}'{extra}}}\nupstreams: [{{name: a, base_url: 'http://h', %s}}]\n"
    for secret in ("api_key: k", "headers: {Authorization: k}"):
        reason = open_proxy_problem(load(write_settings(tmp_path, text % secret), {}, {}))
        assert (reason is not None) == refused
    assert open_proxy_problem(load(write_settings(tmp_path, text % "headers: {x-team: red}"), {}, {})) is None


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="needs litellm's list")
def test_a_provider_that_litellm_does_not_know_is_not_served(tmp_path):
    """A typing error in a provider's name is found before the first request, with the names that are meant."""

    def problem(provider):
        text = f"upstreams: [{{name: a, base_url: 'http://h', provider: {provider}}}]"
        return serving_problem(load(write_settings(tmp_path, text), {}, {}))

    for known in (
        "openai",
        "anthropic",
        "ollama_chat",
        "azure_ai",
        "bedrock_converse",
        "vertex_ai",
        "veniceai",
        "my_own",
    ):
        assert problem(known) is None
    assert "no provider 'opnai'. Did you mean openai" in problem("opnai")
    assert "ollama_chat" in problem("olama_chat")


def test_rules_and_upstreams_are_found(tmp_path):
    """The first matching rule counts, its empty upstream means the default one, and case matters."""
    text = (
        "server: {default_upstream: b}\n"
        "upstreams: [{name: a, base_url: 'http://a/'}, {name: b, base_url: 'http://b'}]\n"
        "models: [{name: 'gpt-5*', upstream: a, context_window: 9}, {name: 'GPT-5*', context_window: 8}]\n"
    )
    settings = load(write_settings(tmp_path, text), {}, {})
    assert settings.upstream(settings.model("gpt-5-mini").upstream).base_url == "http://a"
    assert (settings.model("GPT-5").context_window, settings.model("x").context_window) == (8, None)
    assert settings.upstream("").name == settings.default_upstream().name == "b"
    with pytest.raises(KeyError):
        settings.upstream("c")


@pytest.mark.parametrize(
    ("upstreams", "models", "expected"),
    [
        ("{name: b, base_url: 'https://generativelanguage.googleapis.com'}", "{name: '*'}", "b"),
        ("{name: b, base_url: 'http://b', api_key_header: x-goog-api-key}", "{name: '*'}", "b"),
        ("{name: b, base_url: 'http://b'}", "{name: '*'}", "a"),
        ("{name: b, base_url: 'http://b'}", "{name: 'gemini-*', upstream: b}", "b"),
        ("{name: b, base_url: 'http://b'}", "{name: google/gemini-pro, upstream: b}", "b"),
        ("{name: b, base_url: 'http://b'}", "{name: fast, model: gemini-flash, upstream: b}", "b"),
        ("{name: b, base_url: 'https://x.googleapis.com'}", "{name: 'gemini-*', upstream: a}", "a"),
        ("{name: b, provider: gemini}", "{name: 'gemini-*', upstream: b}", "a"),
    ],
)
def test_the_upstream_of_gemini_is_found(tmp_path, upstreams, models, expected):
    """By the rules for its models, then by address or key header; what LiteLLM translates has none of its paths."""
    text = f"upstreams: [{{name: a, base_url: 'http://a'}}, {upstreams}]\nmodels: [{models}]\n"
    assert load(write_settings(tmp_path, text), {}, {}).gemini_upstream().name == expected


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("[{name: '*', overflow: [compress, {fallback: big}]}]", "lead in a circle: * -> big"),
        (
            "[{name: a, overflow: [{fallback: b}]}, {name: b, overflow: [compress, {fallback: a}]}]",
            "lead in a circle: a -> b",
        ),
        ("[{name: a, overflow: [compress, compress]}]", "a step stands there twice"),
        ("[{name: a, overflow: []}]", "overflow"),
        ("[{name: a, fallback_on: [rate_limit]}]", "fallback_on: needs a model to fall back to"),
        ("[{name: a, overflow: [{fallback: b}], fallback_on: []}]", "fallback_on"),
        ("[{name: a, overflow: [shrink]}]", "overflow"),
        ("[{name: a, overflow: [{model: b}]}]", "overflow"),
        ('[{name: a, overflow: [{fallback: "b\\n"}]}]', "overflow"),
    ],
)
def test_fallbacks_that_lead_nowhere_are_refused(tmp_path, models, message):
    """A circle, a step named twice, none at all, or something else than a step is a problem with its path."""
    text = f"upstreams: [{{name: u, base_url: 'http://h'}}]\nmodels: {models}\n"
    assert any(message in str(problem) for problem in problems(tmp_path, text))


def test_a_long_circle_is_one_short_problem(tmp_path):
    """Hundreds of models that fall back to each other are not a problem each with all names."""
    rules = [f"{{name: m{n}, overflow: [{{fallback: m{(n + 1) % 300}}}]}}" for n in range(300)]
    text = f"upstreams: [{{name: u, base_url: 'http://h'}}]\nmodels: [{', '.join(rules)}]\n"
    (problem,) = problems(tmp_path, text)
    assert "lead in a circle: m0 -> m1 -> m2 -> m3 -> m4 -> ..." in str(problem)


@pytest.mark.parametrize(
    ("models", "provider", "message"),
    [
        ("[{name: a, num_ctx: 8192}]", "openai", "num_ctx: cannot be set through 'u'"),
        ("[{name: a, num_ctx: 8192, context_window: 16384}]", "ollama_chat", "less than the window"),
        ("[{name: a, num_ctx: 8192}]", "ollama_chat", ""),
        ("[{name: a, num_ctx: 8192}]", "ollama", ""),
    ],
)
def test_ollamas_window_needs_ollamas_own_api(tmp_path, models, provider, message):
    """`/v1` of Ollama ignores it: a rule that would do nothing is refused."""
    text = f"upstreams: [{{name: u, base_url: 'http://h', provider: {provider}}}]\nmodels: {models}\n"
    if message:
        assert any(message in str(problem) for problem in problems(tmp_path, text))
        return
    assert load(write_settings(tmp_path, text), {}, {}).models[0].window == 8192


def test_fallbacks_in_any_order(tmp_path):
    """Steps stay in the order they are written in; a fallback that another rule is about leads in no circle."""
    text = (
        "upstreams: [{name: u, base_url: 'http://h'}]\n"
        "models: [{name: big}, {name: '*', overflow: [{fallback: big}, compress]}]\n"
    )
    found = load(write_settings(tmp_path, text), {}, {})
    assert found.models[1].fallbacks == ("big",)
    assert found.models[1].overflow[1] == "compress"
    assert found.models[0].overflow == ("compress",)


@pytest.mark.parametrize(
    ("models", "complaint"),
    [
        ("[{name: fast, model: quick}, {name: quick, model: gpt-5}]", "'quick' is itself another name, for 'gpt-5'"),
        ("[{name: fast, model: quick}, {name: quick, model: fast}]", "'quick' is itself another name, for 'fast'"),
        ("[{name: fast, model: x, upstream: nowhere}]", "there is no upstream 'nowhere'"),
        ("[{name: fast, headers: {Authorization: Bearer x}}]", "carries a key, which belongs to an upstream"),
        ("[{name: fast, headers: {Host: x}}]", "is a header that Ullage sets itself"),
        ("[{name: fast, headers: {a b: x}}]", "is no header name"),
    ],
)
def test_other_names_that_lead_nowhere(tmp_path, models, complaint):
    """A name for a name, an upstream that is not there, or a header that is not a model's, is refused by name."""
    text = f"upstreams: [{{name: up, base_url: http://127.0.0.1:1}}]\nmodels: {models}\n"
    with pytest.raises(SettingsError, match=re.escape(complaint)):
        load(write_settings(tmp_path, text), {}, {})


def test_every_model_may_be_one(tmp_path):
    """One rule may send every name to one model; figures may stand in the model's own rule."""
    text = "upstreams: [{name: up, base_url: http://127.0.0.1:1}]\nmodels: [{name: gpt-5}, {name: '*', model: gpt-5}]\n"
    assert load(write_settings(tmp_path, text), {}, {}).model("x").model == "gpt-5"


def settings_named_in_sentences() -> Iterator[str]:
    """Names such as ``section.key`` in texts of the code, without names of files and of log events."""
    sections = "|".join(AllSettings.model_fields)
    dotted = re.compile(rf"(?<![\w./-])(?:{sections})(?:\[\])?(?:\.[a-z_]+)+(?![\w/])")
    for module in sorted(Path(proxy.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield from dotted.findall(node.value)


@pytest.mark.slow
def test_every_setting_that_a_text_names_exists() -> None:
    """An error that says which key to change names one that can be changed."""
    named = set(settings_named_in_sentences()) - {"store.lock", "tools.yaml"}
    assert "server.limits.in_flight_bytes" in named
    schema = AllSettings.model_json_schema()
    known = {".".join(path) for path in keys(schema, schema["$defs"])}
    assert {name.replace("[]", "") for name in named} - known == set()
