"""LiteLLM's configuration as one of ours: what is converted, what is named, and that the result can be served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.cli.from_litellm import convert, to_yaml
from proxy.features.settings import AllSettings
from proxy.settings import load
from tests.support.forked_ullage import run_ullage


def variables_in(text: str) -> list[str]:
    """Return the environment variables that a configuration names."""
    return sorted(set(re.findall(r"\$\{(\w+)\}", text)))


CONFIG = """\
model_list:
  - model_name: gpt-4o
    litellm_params: {model: openai/gpt-4o, api_key: os.environ/OPENAI_API_KEY}
  - model_name: gpt-4o-mini
    litellm_params: {model: gpt-4o-mini, api_key: os.environ/OPENAI_API_KEY, rpm: 10}
  - model_name: qwen
    litellm_params: {model: hosted_vllm/Qwen/Qwen3-32B, api_base: "http://vllm:8000/v1", timeout: 90}
    model_info: {max_input_tokens: 32768, max_output_tokens: 4096, input_cost_per_token: 0}
  - model_name: claude
    litellm_params: {model: anthropic/claude-sonnet-4-5, api_key: os.environ/ANTHROPIC_API_KEY}
  - model_name: azure-gpt
    litellm_params:
      {model: azure/gpt-4o-eu, api_base: "https://x.openai.azure.com", api_key: k, api_version: "2024-10-21"}
  - model_name: gpt-4o
    litellm_params: {model: azure/gpt-4o-eu}
  - model_name: "*"
    litellm_params: {model: "openai/*", api_key: os.environ/OPENAI_API_KEY}
litellm_settings:
  context_window_fallbacks: [{gpt-4o-mini: [qwen]}, {none: [qwen]}]
  fallbacks: [{qwen: [gpt-4o]}, {gpt-4o-mini: [qwen, gpt-4o]}]
  cache: true
general_settings: {master_key: os.environ/LITELLM_MASTER_KEY, database_url: "postgres://"}
router_settings: {routing_strategy: simple-shuffle}
"""


def converted() -> tuple[dict[str, Any], list[str]]:
    """The conversion of the file above, and its notes."""
    conversion = convert(yaml.safe_load(CONFIG))
    return conversion.sections, conversion.notes


def test_models_keys_and_fallbacks_are_converted() -> None:
    """A rule for each model in order; models of one server and key share an upstream; keys stay in the environment."""
    sections, _ = converted()
    assert [each["name"] for each in sections["upstreams"]] == ["openai", "hosted_vllm", "anthropic", "azure"]
    openai, vllm, anthropic, azure = sections["upstreams"]
    assert openai == {"name": "openai", "base_url": "https://api.openai.com/v1", "api_key": "${OPENAI_API_KEY}"}
    assert (vllm["base_url"], vllm["timeouts"]) == ("http://vllm:8000/v1", {"first_byte": 90.0})
    assert anthropic == {"name": "anthropic", "provider": "anthropic", "api_key": "${ANTHROPIC_API_KEY}"}
    assert azure["options"] == {"api_version": "2024-10-21"}
    rules = {rule["name"]: rule for rule in sections["models"]}
    assert list(rules) == ["gpt-4o", "gpt-4o-mini", "qwen", "claude", "azure-gpt", "*"]
    assert rules["gpt-4o"] == {"name": "gpt-4o", "upstream": "openai"}
    assert rules["gpt-4o-mini"]["overflow"] == [{"fallback": "gpt-4o"}, {"fallback": "qwen"}, "compress"]
    assert rules["gpt-4o-mini"]["fallback_on"] == ["overflow", "rate_limit", "unavailable"]
    assert rules["qwen"] == {
        "name": "qwen",
        "upstream": "hosted_vllm",
        "model": "Qwen/Qwen3-32B",
        "context_window": 32768,
        "max_output_tokens": 4096,
        "overflow": [{"fallback": "gpt-4o"}, "compress"],
        "fallback_on": ["rate_limit", "unavailable"],
    }
    assert sections["server"] == {"access_keys": ["${LITELLM_MASTER_KEY}"]}


def test_what_has_no_counterpart_is_named() -> None:
    """Every key that is not converted has its line; nothing is dropped in silence."""
    _, notes = converted()
    for words in (
        "model_list[1].litellm_params.rpm",
        "model_list[2].model_info.input_cost_per_token",
        "model_list[5]: a second gpt-4o",
        "there is no model none",
        "litellm_settings.cache",
        "general_settings.database_url",
        "router_settings.routing_strategy",
        "virtual keys",
    ):
        assert any(words in note for note in notes), words


def test_the_result_is_a_valid_configuration(tmp_path: Path) -> None:
    """The printed configuration loads if the variables that it names are set."""
    text = to_yaml(convert(yaml.safe_load(CONFIG)))
    file = tmp_path / "ullage.yaml"
    file.write_text(text)
    names = variables_in(text)
    assert names == ["ANTHROPIC_API_KEY", "LITELLM_MASTER_KEY", "OPENAI_API_KEY"]
    settings = load(file, {}, dict.fromkeys(names, "x"), AllSettings)
    assert settings.model("anything").upstream == "openai"


def test_a_fallback_that_no_model_serves_is_left_out_by_name() -> None:
    """LiteLLM has no deployment for such a name and tries the next one; a pattern serves every name that it matches."""
    models = [{"model_name": name, "litellm_params": {"model": f"openai/{name}"}} for name in ("a", "b", "x/*")]
    models.append({"model_name": "unusable", "litellm_params": {"model": "hosted_vllm/q"}})
    settings = {
        "fallbacks": [{"a": ["typo", "b", "x/1", {"model": "b"}]}],
        "context_window_fallbacks": [{"b": ["unusable"]}],
    }
    conversion = convert({"model_list": models, "litellm_settings": settings})
    rules = conversion.rules
    assert rules["a"]["overflow"] == [{"fallback": "b"}, {"fallback": "x/1"}, "compress"]
    assert "overflow" not in rules["b"]
    for name in ("typo", "unusable", "{'model': 'b'}"):
        assert any(f"to {name} is left out" in note for note in conversion.notes), name


ODD = """\
model_list:
  - {model_name: "*", litellm_params: {model: "*"}}
  - {model_name: "anthropic/*", litellm_params: {model: "anthropic/*"}}
  - {model_name: a, litellm_params: {model: openai/gpt-4o}}
  - not a model
  - {model_name: "anthropic/claude*", litellm_params: {model: "anthropic/claude*"}}
  - {model_name: b, litellm_params: {model: openai/gpt-4.1}}
  - {model_name: 5, litellm_params: null}
litellm_settings:
  fallbacks: [{a: [b, b]}, {b: [a, "anthropic/claude-x"]}, {"anthropic/claude*": [zz]}, {"*": [b, a]}, x, {a: [a]}]
router_settings: [1]
"""


def test_a_litellm_file_with_circular_fallbacks_becomes_a_valid_configuration(tmp_path: Path) -> None:
    """Names come before patterns, as LiteLLM takes them, and fallbacks that lead in a circle are left out by name."""
    conversion = convert(yaml.safe_load(ODD))
    file = tmp_path / "ullage.yaml"
    file.write_text(to_yaml(conversion))
    settings = load(file, {}, {}, AllSettings)
    assert [rule.name for rule in settings.models] == ["a", "b", "anthropic/claude*", "anthropic/*", "*"]
    fallbacks = {rule.name: rule.fallbacks for rule in settings.models}
    assert (fallbacks["a"], fallbacks["b"]) == (("b",), ("anthropic/claude-x",))
    assert (fallbacks["anthropic/claude*"], fallbacks["anthropic/*"], fallbacks["*"]) == (("zz",), ("b", "a"), ())
    circles = [note.partition(": ")[2] for note in conversion.notes if "circle" in note]
    assert circles == [
        "b to a leads in a circle",
        "a to a leads in a circle",
        "* to b leads in a circle",
        "* to a leads in a circle",
    ]
    assert "model_list[3]: is no model" in conversion.notes


ALIASED = """\
model_list:
  - {model_name: gpt, litellm_params: {model: azure/eu, api_base: "http://a", api_version: "1", headers: {X-Team: a}}}
  - model_name: llama
    litellm_params: {model: ollama_chat/llama3.1, api_base: "http://o:11434", num_ctx: 16384, timeout: 20}
    model_info: {max_input_tokens: 131072}
  - {model_name: completions, litellm_params: {model: ollama/llama3.1, num_ctx: 8192}}
  - {model_name: "*", litellm_params: {model: "openrouter/*", api_key: k}}
litellm_settings:
  request_timeout: 600
  fallbacks: [{gpt-4: [best]}]
  default_fallbacks: [gpt]
router_settings:
  model_group_alias: {gpt-4: gpt, best: {model: llama, hidden: true}, new: o9, gpt: llama}
"""


def test_further_names_and_common_settings_are_converted(tmp_path: Path) -> None:
    """Aliases get the rule of their model; fallbacks and timeouts of all hold for models that have none."""
    conversion = convert(yaml.safe_load(ALIASED))
    file = tmp_path / "ullage.yaml"
    file.write_text(to_yaml(conversion))
    settings = load(file, {}, {}, AllSettings)
    rules = {rule.name: rule for rule in settings.models}
    assert list(rules) == ["gpt", "llama", "completions", "gpt-4", "best", "new", "*"]
    assert (rules["gpt-4"].upstream, rules["gpt-4"].model, rules["gpt-4"].fallbacks) == ("azure", "eu", ("llama",))
    assert (rules["best"].model, rules["best"].num_ctx, rules["best"].window) == ("llama3.1", 16_384, 16_384)
    assert (rules["completions"].upstream, rules["completions"].num_ctx) == ("ollama", 8192)
    assert (rules["new"].upstream, rules["new"].model) == ("openrouter", "o9")
    assert (rules["gpt"].fallbacks, rules["completions"].fallbacks) == (("llama",), ("gpt",))
    timeouts = {each.name: each.timeouts.first_byte for each in settings.upstreams}
    assert timeouts == {"azure": 600, "ollama_chat": 20, "ollama": 600, "openrouter": 600}
    assert settings.upstreams[0].headers["X-Team"].get_secret_value() == "a"
    assert conversion.notes == [
        "router_settings.model_group_alias: gpt is a model itself",
        "litellm_settings.fallbacks: llama to gpt leads in a circle",
    ]


def test_a_name_for_no_model_is_named() -> None:
    """Such an alias is left out, and so is nothing else."""
    models = [{"model_name": "a", "litellm_params": {"model": "openai/a"}}]
    conversion = convert(
        {"model_list": models, "router_settings": {"model_group_alias": {"b": "c", "d": {}, "e": "a"}}}
    )
    assert [rule["name"] for rule in conversion.models] == ["a", "e"]
    assert [note.partition(": ")[2] for note in conversion.notes] == ["there is no model c", "there is no model None"]


def test_odd_entries_are_named_and_skipped() -> None:
    """An entry without a name or without an address has its line."""
    conversion = convert({"model_list": [{}, 3, {"model_name": "a", "litellm_params": {"model": "hosted_vllm/m"}}]})
    assert conversion.models == []
    assert [note.split(":")[0] for note in conversion.notes] == [f"model_list[{at}]" for at in range(3)]


@pytest.mark.slow
def test_check_prints_the_configuration_and_the_notes(tmp_path: Path) -> None:
    """The file on standard output, the rest on standard error; a wrong file exits 1."""
    file = tmp_path / "litellm.yaml"
    file.write_text(CONFIG)
    done = run_ullage("check", "--from-litellm", str(file))
    assert (done.returncode, yaml.safe_load(done.stdout)) == (0, converted()[0])
    assert "litellm_settings.cache: no counterpart" in done.stderr
    file.write_text("x: 1\n")
    refused = run_ullage("check", "--from-litellm", str(file))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "has no model_list" in refused.stderr


SPELLED = """\
model_list:
  - model_name: gpt
    litellm_params: {model: azure/gpt-4o, litellm_credential_name: eu, api_key: os.environ/OWN}
  - model_name: lost
    litellm_params: {model: azure/gpt-4o, litellm_credential_name: us}
  - model_name: sonnet
    litellm_params: {model: bedrock/eu.claude, aws_profile_name: dev, aws_role_name: "arn:1"}
  - model_name: bare
    litellm_params: {model: facebook/opt-125m, custom_llm_provider: hosted_vllm, api_base: "http://v/v1", timeout: "30"}
    model_info: {max_input_tokens: "32768"}
  - model_name: o1-pro
    litellm_params: {model: openai/responses/o1-pro, organization: org-1, timeout: os.environ/SECONDS}
    model_info: {max_input_tokens: many}
  - model_name: instruct
    litellm_params: {model: text-completion-openai/gpt-3.5-turbo-instruct}
  - model_name: null
    litellm_params: {model: openai/x}
  - model_name: "*"
    litellm_params: {model: "*"}
  - model_name: "groq/*"
    litellm_params: {model: "groq/*"}
  - model_name: "two/*/*"
    litellm_params: {model: "groq/*"}
credential_list:
  - credential_name: eu
    credential_values: {api_key: os.environ/EU, api_base: "https://eu.openai.azure.com", api_version: "2024-10-21"}
"""


def test_credentials_numbers_and_providers_of_every_spelling_are_converted(tmp_path: Path) -> None:
    """What LiteLLM's documentation shows in the wild is converted, or has its line; nothing is lost without one."""
    conversion = convert(yaml.safe_load(SPELLED))
    file = tmp_path / "ullage.yaml"
    file.write_text(to_yaml(conversion))
    settings = load(file, {}, dict.fromkeys(variables_in(to_yaml(conversion)), "x"), AllSettings)
    rules = {rule.name: rule for rule in settings.models}
    assert list(rules) == ["gpt", "lost", "sonnet", "bare", "o1-pro", "two/*/*", "groq/*", "*"]
    assert (rules["groq/*"].model, rules["two/*/*"].model, rules["*"].model) == ("*", "", "")
    upstreams = {each["name"]: each for each in conversion.upstreams}
    assert upstreams["azure"]["api_key"] == "${OWN}"
    assert upstreams["azure"]["options"] == {"api_version": "2024-10-21"}
    assert upstreams["bedrock"]["options"] == {"aws_profile_name": "dev", "aws_role_name": "arn:1"}
    assert (rules["bare"].model, rules["bare"].window) == ("facebook/opt-125m", 32_768)
    assert upstreams["hosted_vllm"]["timeouts"] == {"first_byte": 30.0}
    assert rules["o1-pro"].model == ""
    assert conversion.notes == [
        "model_list[1].litellm_params.litellm_credential_name: no counterpart",
        "model_list[4]: o1-pro is asked over the API that the client speaks, not over Responses",
        "model_list[4].litellm_params.organization: no counterpart",
        "model_list[4].litellm_params.timeout: no counterpart",
        "model_list[4].model_info.max_input_tokens: no counterpart",
        "model_list[5]: text-completion-openai is no provider of chat models",
        "model_list[6]: has no model_name or no litellm_params.model",
        "model_list[7]: models of all providers go to OpenAI; LiteLLM reads the provider in a name",
        "model_list[9]: models that match two/*/* keep their whole name; LiteLLM takes the provider off",
    ]
