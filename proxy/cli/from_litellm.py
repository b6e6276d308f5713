"""Converts the configuration of LiteLLM's proxy into one of ours, and names each key that has no counterpart.

LiteLLM's keys are those of https://docs.litellm.ai/docs/proxy/config_settings.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import yaml

from proxy.core.apis.json_steps import as_object
from proxy.core.tool_table import is_glob
from proxy.settings.upstreams import OLLAMA

OWN_API: Final = {
    "openai": "https://api.openai.com/v1",
    "custom_openai": "",
    "hosted_vllm": "",
    "litellm_proxy": "",
    "llamafile": "http://127.0.0.1:8080/v1",
    "lm_studio": "",
    "openai_like": "",
}
"""LiteLLM's providers that speak OpenAI's API: Ullage calls them itself. The value is the default address, if any.

https://docs.litellm.ai/docs/providers
"""

PARAMETERS: Final = frozenset(
    {
        "model",
        "custom_llm_provider",
        "api_base",
        "base_url",
        "api_key",
        "extra_headers",
        "headers",
        "timeout",
        "stream_timeout",
    }
)
"""Members of ``litellm_params`` that are converted."""

OPTIONS: Final = frozenset(
    {
        "api_version", "azure_ad_token", "tenant_id", "client_id", "client_secret", "organization", "region_name",
        "aws_region_name", "aws_access_key_id", "aws_secret_access_key", "aws_session_token", "aws_profile_name",
        "aws_role_name", "aws_session_name", "aws_bedrock_runtime_endpoint",
        "vertex_project", "vertex_location", "vertex_credentials", "vertex_ai_project", "vertex_ai_location",
        "vertex_ai_credentials",
    }
)  # fmt: skip
"""Members of ``litellm_params`` that go to ``upstreams[].options``."""

CREDENTIAL: Final = "litellm_credential_name"
"""The member of ``litellm_params`` that names an entry of ``credential_list``: the entry's values are its defaults.

https://docs.litellm.ai/docs/proxy/configs
"""

RESPONSES: Final = "responses/"
"""A prefix of a model's name, with which LiteLLM sends chat requests to the Responses API."""

FIGURES: Final = {"max_input_tokens": "context_window", "max_output_tokens": "max_output_tokens"}
"""Members of ``model_info`` that are converted, with their names here."""

IGNORED_FACTS: Final = frozenset({"id", "mode", "max_tokens", "base_model", "description"})
"""Members of ``model_info`` that change nothing here."""

EVERY_MODEL: Final = "*"
"""The key of an entry of fallbacks for each model without an entry of its own, as ``default_fallbacks`` are."""

ALIASES: Final = "model_group_alias"
"""The member of ``router_settings`` that gives models further names."""

TIMEOUTS: Final = {"router_settings": "timeout", "litellm_settings": "request_timeout"}
"""The keys of the default timeout, by section; the first one that is set wins.

https://docs.litellm.ai/docs/proxy/timeout
"""

FALLBACKS: Final[dict[str, list[str]]] = {
    "context_window_fallbacks": ["overflow"],
    "fallbacks": ["rate_limit", "unavailable"],
}
"""LiteLLM's lists of fallback models, each with the reasons for a fallback here.

https://docs.litellm.ai/docs/proxy/reliability
"""

_VARIABLE: Final = re.compile(r"os\.environ/(\w+)")
_PROVIDER: Final = re.compile(r"[a-z][a-z0-9_]*")
_NUMBER: Final = re.compile(r"\d+(\.\d+)?")
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass
class Conversion:
    """A configuration of ours, and a line for each key that has no counterpart in it."""

    upstreams: list[dict[str, Any]] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    server: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def rules(self) -> dict[str, dict[str, Any]]:
        """The models' rules by name, in their order."""
        return {rule["name"]: rule for rule in self.models}

    @property
    def sections(self) -> dict[str, Any]:
        """The configuration's sections, without empty ones."""
        sections = {"server": self.server, "upstreams": self.upstreams, "models": self.models}
        return {name: section for name, section in sections.items() if section}


def convert(config: Mapping[str, Any]) -> Conversion:
    """Return the conversion of LiteLLM's configuration *config*."""
    conversion = Conversion()
    timeouts = [_section(config, section).get(key) for section, key in TIMEOUTS.items()]
    timeout = next((seconds for seconds in timeouts if seconds), None)
    credentials = _credentials(config)
    for index, entry in enumerate(config["model_list"]):
        if isinstance(entry, dict):
            params = {"timeout": timeout, **_with_credential(_section(entry, "litellm_params"), credentials)}
            _add_model(conversion, entry, params, f"model_list[{index}]")
        else:
            conversion.notes.append(f"model_list[{index}]: is no model")
    conversion.models.sort(key=_precedence)
    aliases = _aliases(conversion, _section(config, "router_settings"))
    for section, key in product(("litellm_settings", "router_settings"), FALLBACKS):
        _add_fallbacks(conversion, _fallbacks(_section(config, section), key, aliases), f"{section}.{key}")
    _add_aliases(conversion, aliases)
    conversion.models.sort(key=_precedence)
    general = _section(config, "general_settings")
    if general.get("master_key"):
        conversion.server["access_keys"] = [_with_our_variables(str(general["master_key"]))]
        conversion.notes.append(
            "general_settings.master_key: one of server.access_keys; virtual keys have no counterpart"
        )
    conversion.notes += sorted(_without_counterpart(config))
    return conversion


def _credentials(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the values of each entry of ``credential_list`` in *config*, by its name."""
    entries = config.get("credential_list")
    if not isinstance(entries, list):
        return {}
    named = [entry for entry in entries if isinstance(entry, dict)]
    return {str(entry.get("credential_name")): _section(entry, "credential_values") for entry in named}


def _with_credential(params: Mapping[str, Any], credentials: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return *params* with the values of the credential that they name; unchanged if there is none of that name."""
    values = credentials.get(str(params.get(CREDENTIAL)))
    if values is None:
        return dict(params)
    return {**values, **{key: value for key, value in params.items() if key != CREDENTIAL}}


def _add_model(conversion: Conversion, entry: Mapping[str, Any], params: Mapping[str, Any], path: str) -> None:
    """Add the rule and the upstream of the *entry* of ``model_list`` at *path*, whose parameters are *params*."""
    name = _text(entry, "model_name")
    provider, model = _provider_and_model(_text(params, "model"), _text(params, "custom_llm_provider"))
    upstream = _upstream_of(provider, params)
    reason = _unusable(conversion, name, provider, model, upstream)
    if reason:
        conversion.notes.append(f"{path}: {reason}")
        return
    if provider in OWN_API and model.startswith(RESPONSES):
        model = model.removeprefix(RESPONSES)
        conversion.notes.append(f"{path}: {model} is asked over the API that the client speaks, not over Responses")
    facts = _section(entry, "model_info")
    limits = _limits(name, model, facts)
    converted = PARAMETERS
    if provider not in OWN_API:
        converted = PARAMETERS | OPTIONS
    context = _whole_number(params.get("num_ctx"))
    if provider in OLLAMA and context is not None:
        limits["num_ctx"] = context
        limits.pop("context_window", None)  # num_ctx is the window, too
        converted |= {"num_ctx"}
    conversion.models.append({"name": name, "upstream": _add_upstream(conversion, provider, upstream), **limits})
    if "*" in name and "model" not in limits and name != model:
        conversion.notes.append(
            f"{path}: models that match {name} keep their whole name; LiteLLM takes the provider off"
        )
    if params["model"] == "*":
        conversion.notes.append(f"{path}: models of all providers go to OpenAI; LiteLLM reads the provider in a name")
    conversion.notes += [f"{path}.{key}: no counterpart" for key in _unknown_keys(params, converted, facts)]


def _unusable(conversion: Conversion, name: str, provider: str, model: str, upstream: Mapping[str, Any]) -> str:
    """Return why the model *name* of *provider* is left out, behind *upstream*; empty if it is not."""
    if not name or not model:
        return "has no model_name or no litellm_params.model"
    if any(rule["name"] == name for rule in conversion.models):
        return f"a second {name}: requests are not balanced; the first one is taken"
    if not _PROVIDER.fullmatch(provider):
        return f"{provider} is no provider of chat models"
    if provider in OWN_API and "base_url" not in upstream:
        return f"{provider} needs an api_base here"
    return ""


def _text(members: Mapping[str, Any], name: str) -> str:
    """Return the member *name* as a text; empty if there is none."""
    value = members.get(name)
    if value is None:
        return ""
    return str(value)


def _whole_number(value: Any) -> int | None:
    """Return *value* as a whole number, which may be written as a text; None if it is none."""
    number = _seconds(value)
    if number is None or not number.is_integer():
        return None
    return int(number)


def _seconds(value: Any) -> float | None:
    """Return *value* as a number, which may be written as a text; None if it is none above 0."""
    if isinstance(value, bool) or not _NUMBER.fullmatch(str(value)):
        return None
    return float(value) or None


def _precedence(rule: Mapping[str, Any]) -> tuple[bool, int]:
    """Return the sort key of *rule*: a name comes before a pattern, and a longer pattern before a shorter one.

    LiteLLM chooses the rule for a model in this order (https://docs.litellm.ai/docs/wildcard_routing); here the first
    match in the list wins.
    """
    name = rule["name"]
    if "*" in name:
        return True, -len(name)
    return False, 0


def _limits(name: str, model: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of the rule *name* beside its upstream: the *model* if that is another name, and limits."""
    figures = {ours: _whole_number(facts.get(theirs)) for theirs, ours in FIGURES.items()}
    limits = {key: figure for key, figure in figures.items() if figure is not None}
    if model != name and (name.count("*") == model.count("*") == 1 or "*" not in name):
        return {"model": model, **limits}
    return limits


def _unknown_keys(params: Mapping[str, Any], converted: Iterable[str], facts: Mapping[str, Any]) -> list[str]:
    """Return the members of ``litellm_params`` and ``model_info`` without a counterpart.

    *converted* are the names of parameters that are converted.
    """
    unread = [key for key in FIGURES if facts.get(key) is not None and _whole_number(facts[key]) is None]
    unread += facts.keys() - (FIGURES.keys() | IGNORED_FACTS)
    unknown = [f"model_info.{key}" for key in unread]
    times = [key for key in ("timeout", "stream_timeout") if params.get(key) and _seconds(params[key]) is None]
    unknown += [f"litellm_params.{key}" for key in [*times, *(params.keys() - converted)]]
    return sorted(unknown)


def _provider_and_model(model: str, provider: str) -> tuple[str, str]:
    """Return provider and name of a LiteLLM *model*, such as ``anthropic/claude-sonnet-4``.

    LiteLLM knows the provider of a well-known name without a prefix: https://docs.litellm.ai/docs/providers. A
    *provider* that is configured explicitly wins.
    """
    first, slash, name = model.partition("/")
    if provider:
        return provider, model.removeprefix(f"{provider}/")
    if slash:
        return first, name
    if model.startswith("claude"):
        return "anthropic", model
    return "openai", model


def _upstream_of(provider: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the upstream that *params* describe, without a name."""
    upstream: dict[str, Any] = {}
    if provider not in OWN_API:
        upstream["provider"] = provider
    address = params.get("api_base") or params.get("base_url") or OWN_API.get(provider, "")
    if address:
        upstream["base_url"] = _with_our_variables(str(address))
    if params.get("api_key"):
        upstream["api_key"] = _with_our_variables(str(params["api_key"]))
    if headers := _texts({**_section(params, "headers"), **_section(params, "extra_headers")}):
        upstream["headers"] = headers
    options = _texts({key: params[key] for key in sorted(OPTIONS & params.keys())})
    if options and provider not in OWN_API:
        upstream["options"] = options
    seconds = _seconds(params.get("stream_timeout")) or _seconds(params.get("timeout"))
    if seconds is not None:
        upstream["timeouts"] = {"first_byte": seconds}
    return upstream


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return *values* as texts, with environment variables in our syntax."""
    return {str(name): _with_our_variables(str(value)) for name, value in values.items()}


def _add_upstream(conversion: Conversion, provider: str, upstream: dict[str, Any]) -> str:
    """Add *upstream* unless an equal one exists, and return its name.

    The name is that of the *provider*, with a number if it is in use.
    """
    names = []
    for existing in conversion.upstreams:
        if {key: value for key, value in existing.items() if key != "name"} == upstream:
            return str(existing["name"])
        names.append(existing["name"])
    plain = _NOT_IN_NAMES.sub("-", provider)
    name, number = plain, 1
    while name in names:
        number += 1
        name = f"{plain}-{number}"
    conversion.upstreams.append({"name": name, **upstream})
    return name


def _aliases(conversion: Conversion, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the further names of models in *settings*, each with the name of its model.

    https://docs.litellm.ai/docs/proxy/configs
    """
    rules, aliases = conversion.rules, {}
    for alias, target in _section(settings, ALIASES).items():
        model = target
        if isinstance(target, dict):
            model = target.get("model")
        if alias in rules:
            conversion.notes.append(f"router_settings.{ALIASES}: {alias} is a model itself")
        elif not _rule_of(rules, str(model)):
            conversion.notes.append(f"router_settings.{ALIASES}: there is no model {model}")
        else:
            aliases[str(alias)] = str(model)
    return aliases


def _add_aliases(conversion: Conversion, aliases: Mapping[str, str]) -> None:
    """Add a rule for each further name: that of its model, fallbacks included."""
    for alias, model in aliases.items():
        rule = _rule_of(conversion.rules, model)
        conversion.models.append({**deepcopy(rule), "name": alias, "model": rule.get("model", model)})


def _fallbacks(settings: Mapping[str, Any], key: str, aliases: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Return the entries of the list *key* in *settings*: a model and its fallbacks, with aliases resolved."""
    pairs = [*_pairs(settings.get(key))]
    if key == "fallbacks" and settings.get("default_fallbacks"):
        pairs.append((EVERY_MODEL, settings["default_fallbacks"]))
    named = []
    for model, others in pairs:
        if isinstance(others, list):
            others = [aliases.get(str(name), str(name)) for name in others]
        named.append((aliases.get(str(model), str(model)), others))
    return named


def _add_fallbacks(conversion: Conversion, fallbacks: Sequence[tuple[str, Any]], path: str) -> None:
    """Add the *fallbacks* of the list at *path* to the rules of their models."""
    rules = conversion.rules
    for model, others in _with_default_entries(fallbacks, list(rules)):
        if model not in rules or not isinstance(others, list):
            conversion.notes.append(f"{path}: there is no model {model}")
            continue
        steps = []
        for name in dict.fromkeys(others):
            if not _rule_of(rules, name):
                conversion.notes.append(f"{path}: {model} to {name} is left out; there is no model {name}")
            elif _leads_back(rules, rules[model], name):
                conversion.notes.append(f"{path}: {model} to {name} leads in a circle")
            else:
                steps.append({"fallback": name})
        _add_fallback(rules[model], steps, path.partition(".")[2])


def _with_default_entries(fallbacks: Sequence[tuple[str, Any]], models: Sequence[str]) -> list[tuple[str, Any]]:
    """Return *fallbacks* with those of ``EVERY_MODEL`` replaced by an entry for each of *models* without its own."""
    own = [pair for pair in fallbacks if pair[0] != EVERY_MODEL]
    without = [model for model in models if model not in dict(own)]
    common = [others for model, others in fallbacks if model == EVERY_MODEL and isinstance(others, list)]
    added = [(model, [other for other in others if other != model]) for others in common for model in without]
    return own + added


def _rule_of(rules: Mapping[str, Mapping[str, Any]], model: str) -> Mapping[str, Any]:
    """Return the first of the *rules* by name that is for *model*; an empty one if there is none."""
    if model in rules:  # names come before patterns
        return rules[model]
    globs = (rule for name, rule in rules.items() if is_glob(name) and fnmatch.fnmatchcase(model, name))
    return next(globs, {})


def _leads_back(rules: Mapping[str, Mapping[str, Any]], rule: Mapping[str, Any], name: str) -> bool:
    """True if *rule* is that of the model *name*, or of a model that its fallbacks lead to."""
    waiting, visited = [name], set()
    while waiting:
        reached = _rule_of(rules, waiting.pop())
        if reached is rule:
            return True
        if reached.get("name") not in visited:
            visited.add(reached.get("name"))
            waiting += [step["fallback"] for step in reached.get("overflow", ()) if step != "compress"]
    return False


def _pairs(objects: Any) -> Iterable[tuple[Any, Any]]:
    """Return the members of all objects in the list *objects*; nothing for a value of another type."""
    if not isinstance(objects, list):
        return ()
    return [pair for value in objects if isinstance(value, dict) for pair in value.items()]


def _add_fallback(rule: dict[str, Any], steps: list[Any], key: str) -> None:
    """Add the *steps* of LiteLLM's list *key* to those that *rule* has: here one list is for all reasons."""
    if not steps:
        return
    present = rule.get("overflow", [])
    added = [step for step in steps if step not in present]
    rule["overflow"] = [*added, *(present or ["compress"])]
    reasons = list(FALLBACKS[key])
    if present:
        reasons = [*rule.get("fallback_on", ["overflow"]), *reasons]
    if reasons != ["overflow"]:
        rule["fallback_on"] = list(dict.fromkeys(reasons))


def _without_counterpart(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key outside ``model_list`` that is not converted."""
    converted = {
        "litellm_settings": {*FALLBACKS, "default_fallbacks", TIMEOUTS["litellm_settings"]},
        "router_settings": {*FALLBACKS, "default_fallbacks", TIMEOUTS["router_settings"], ALIASES},
        "general_settings": {"master_key"},
    }
    for section, value in config.items():
        if section in ("model_list", "credential_list"):
            continue
        if not isinstance(value, dict):
            yield f"{section}: no counterpart"
            continue
        for key in value.keys() - converted.get(section, set()):
            yield f"{section}.{key}: no counterpart"


def _section(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object called *name* in *value*; an empty one if there is none."""
    return as_object(value.get(name))


def _with_our_variables(text: str) -> str:
    """Return *text* with LiteLLM's ``os.environ/NAME`` replaced by our ``${NAME}``."""
    return _VARIABLE.sub(r"${\1}", text)


def to_yaml(conversion: Conversion) -> str:
    """Return the configuration as the text of a file."""
    return yaml.safe_dump(conversion.sections, sort_keys=False, allow_unicode=True, width=120)
