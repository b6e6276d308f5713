"""Converts the configuration of LiteLLM's proxy into one of ours, and names what has no counterpart.

Its keys are those of https://docs.litellm.ai/docs/proxy/config_settings.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

import yaml

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
    {"model", "api_base", "base_url", "api_key", "extra_headers", "headers", "timeout", "stream_timeout"}
)
"""Members of ``litellm_params`` that are converted."""

OPTIONS: Final = frozenset({"api_version", "aws_region_name", "vertex_project", "vertex_location", "region_name"})
"""Members of ``litellm_params`` that go to ``upstreams[].options``."""

FIGURES: Final = {"max_input_tokens": "context_window", "max_output_tokens": "max_output_tokens"}
"""Members of ``model_info`` that are converted, with their names here."""

IGNORED_FACTS: Final = frozenset({"id", "mode", "max_tokens", "base_model", "description"})
"""Members of ``model_info`` that change nothing here."""

OLLAMA: Final = "ollama_chat"
"""The provider whose rules may have ``num_ctx``, here as there."""

EVERY_MODEL: Final = "*"
"""In a list of fallbacks: each model without an entry of its own, as with ``default_fallbacks``."""

ALIASES: Final = "model_group_alias"
"""The member of ``router_settings`` that gives models further names."""

TIMEOUTS: Final = {"router_settings": "timeout", "litellm_settings": "request_timeout"}
"""Where the timeout of models without one stands, the nearer one first: https://docs.litellm.ai/docs/proxy/timeout"""

FALLBACKS: Final[dict[str, list[str]]] = {
    "context_window_fallbacks": ["overflow"],
    "fallbacks": ["rate_limit", "unavailable"],
}
"""LiteLLM's lists of models that are asked instead, with our reasons. https://docs.litellm.ai/docs/proxy/reliability"""

_VARIABLE: Final = re.compile(r"os\.environ/(\w+)")
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")


class NotLiteLLM(Exception):
    """The file cannot be converted; the text says why."""


@dataclass
class Conversion:
    """A configuration of ours, and a line for each key that has no counterpart in it."""

    upstreams: list[dict[str, Any]] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    server: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def sections(self) -> dict[str, Any]:
        """The configuration's sections, without empty ones."""
        sections = {"server": self.server, "upstreams": self.upstreams, "models": self.models}
        return {name: section for name, section in sections.items() if section}


def read_file(path: Path) -> dict[str, Any]:
    """Return LiteLLM's configuration in the file *path*. Raises ``NotLiteLLM`` and ``OSError``."""
    try:
        value = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeError) as error:
        raise NotLiteLLM(f"is no YAML: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("model_list"), list):
        raise NotLiteLLM("has no model_list: it is no configuration of LiteLLM's proxy.")
    return value


def convert(config: Mapping[str, Any]) -> Conversion:
    """Return the conversion of LiteLLM's configuration *config*."""
    conversion = Conversion()
    timeouts = [_section(config, section).get(key) for section, key in TIMEOUTS.items()]
    timeout = next((seconds for seconds in timeouts if seconds), None)
    for index, entry in enumerate(config["model_list"]):
        if isinstance(entry, dict):
            _add_model(conversion, entry, timeout, f"model_list[{index}]")
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
        conversion.server["access_keys"] = [_value(str(general["master_key"]))]
        conversion.notes.append(
            "general_settings.master_key: one of server.access_keys; virtual keys have no counterpart"
        )
    conversion.notes += sorted(_without_counterpart(config))
    return conversion


def _add_model(conversion: Conversion, entry: Mapping[str, Any], timeout: Any, path: str) -> None:
    """Add the rule and the upstream of one *entry* of ``model_list``, which stands at *path*.

    Without a timeout of its own it has *timeout*.
    """
    name, params = str(entry.get("model_name", "")), _section(entry, "litellm_params")
    litellm_model = str(params.get("model", ""))
    if not name or not litellm_model:
        conversion.notes.append(f"{path}: has no model_name or no litellm_params.model")
        return
    if any(rule["name"] == name for rule in conversion.models):
        conversion.notes.append(f"{path}: a second {name}: requests are not balanced; the first one is taken")
        return
    provider, model = _split(litellm_model)
    upstream = _upstream_of(provider, {"timeout": timeout, **params})
    if provider in OWN_API and "base_url" not in upstream:
        conversion.notes.append(f"{path}: {provider} needs an api_base here")
        return
    facts = _section(entry, "model_info")
    figures = _figures(name, model, facts)
    ours = PARAMETERS | OPTIONS
    if provider == OLLAMA and isinstance(params.get("num_ctx"), int):
        figures["num_ctx"] = params["num_ctx"]
        figures.pop("context_window", None)  # num_ctx is the window, too
        ours |= {"num_ctx"}
    conversion.models.append({"name": name, "upstream": _add_upstream(conversion, provider, upstream), **figures})
    if "*" in name and name != "*":
        conversion.notes.append(
            f"{path}: models that match {name} keep their whole name; LiteLLM takes the provider off"
        )
    conversion.notes += [f"{path}.{key}: no counterpart" for key in _unknown_keys(params.keys() - ours, facts)]


def _precedence(rule: Mapping[str, Any]) -> tuple[bool, int]:
    """Return the place of *rule*: here the first match holds, in LiteLLM a name before a pattern, the longest first.

    https://docs.litellm.ai/docs/wildcard_routing
    """
    name = rule["name"]
    if "*" in name:
        return True, -len(name)
    return False, 0


def _figures(name: str, model: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of the rule *name* beside its upstream: the *model* if that is another name, and limits."""
    figures = {ours: facts[theirs] for theirs, ours in FIGURES.items() if isinstance(facts.get(theirs), int)}
    if "*" not in name and model != name:
        return {"model": model, **figures}
    return figures


def _unknown_keys(params: Iterable[str], facts: Mapping[str, Any]) -> list[str]:
    """Return the members of ``litellm_params`` and ``model_info`` that are not converted: *params* of the former."""
    unknown = [f"litellm_params.{key}" for key in params]
    unknown += [f"model_info.{key}" for key in facts.keys() - (FIGURES.keys() | IGNORED_FACTS)]
    return sorted(unknown)


def _split(model: str) -> tuple[str, str]:
    """Return provider and name of a LiteLLM *model*, such as ``anthropic/claude-sonnet-4``.

    LiteLLM knows the provider of a well-known name without a prefix: https://docs.litellm.ai/docs/providers
    """
    provider, slash, name = model.partition("/")
    if slash:
        return provider, name
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
        upstream["base_url"] = _value(str(address))
    if params.get("api_key"):
        upstream["api_key"] = _value(str(params["api_key"]))
    if headers := _texts({**_section(params, "headers"), **_section(params, "extra_headers")}):
        upstream["headers"] = headers
    options = _texts({key: params[key] for key in sorted(OPTIONS & params.keys())})
    if options and provider not in OWN_API:
        upstream["options"] = options
    seconds = params.get("stream_timeout") or params.get("timeout")
    if isinstance(seconds, int | float) and seconds > 0:
        upstream["timeouts"] = {"first_byte": float(seconds)}
    return upstream


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return *values* as texts, with environment variables as they are written here."""
    return {str(name): _value(str(value)) for name, value in values.items()}


def _add_upstream(conversion: Conversion, provider: str, upstream: dict[str, Any]) -> str:
    """Add *upstream* unless there is one like it, and return the name of that one.

    It is called after its *provider*, with a number if the name is in use.
    """
    names = []
    for known in conversion.upstreams:
        if {key: value for key, value in known.items() if key != "name"} == upstream:
            return str(known["name"])
        names.append(known["name"])
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
    names = {rule["name"] for rule in conversion.models}
    aliases = {}
    for alias, target in _section(settings, ALIASES).items():
        model = target
        if isinstance(target, dict):
            model = target.get("model")
        if alias in names:
            conversion.notes.append(f"router_settings.{ALIASES}: {alias} is a model itself")
        elif not _rule_of(conversion.models, str(model)):
            conversion.notes.append(f"router_settings.{ALIASES}: there is no model {model}")
        else:
            aliases[str(alias)] = str(model)
    return aliases


def _add_aliases(conversion: Conversion, aliases: Mapping[str, str]) -> None:
    """Add a rule for each further name: that of its model, fallbacks included."""
    for alias, model in aliases.items():
        rule = _rule_of(conversion.models, model)
        conversion.models.append({**deepcopy(rule), "name": alias, "model": rule.get("model", model)})


def _fallbacks(settings: Mapping[str, Any], key: str, aliases: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Return the entries of the list *key* in *settings*: models, and those asked instead, by their own names."""
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
    rules = {rule["name"]: rule for rule in conversion.models}
    for model, others in _spread(fallbacks, list(rules)):
        if model not in rules or not isinstance(others, list):
            conversion.notes.append(f"{path}: there is no model {model}")
            continue
        steps = []
        for name in dict.fromkeys(others):
            if _leads_back(conversion.models, rules[model], name):
                conversion.notes.append(f"{path}: {model} to {name} leads in a circle")
            else:
                steps.append({"fallback": name})
        _add_fallback(rules[model], steps, path.partition(".")[2])


def _spread(fallbacks: Sequence[tuple[str, Any]], models: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the *fallbacks* with those of every model last, given to each of the *models* that has none of its own."""
    own = [pair for pair in fallbacks if pair[0] != EVERY_MODEL]
    without = [model for model in models if model not in dict(own)]
    common = [others for model, others in fallbacks if model == EVERY_MODEL and isinstance(others, list)]
    given = [(model, [other for other in others if other != model]) for others in common for model in without]
    return own + given


def _rule_of(rules: Sequence[Mapping[str, Any]], model: str) -> Mapping[str, Any]:
    """Return the first of the *rules* that is for *model*; an empty one if there is none."""
    return next((rule for rule in rules if fnmatch.fnmatchcase(model, rule["name"])), {})


def _leads_back(rules: Sequence[Mapping[str, Any]], rule: Mapping[str, Any], name: str) -> bool:
    """True if *rule* is that of the model *name*, or of a model that its fallbacks lead to."""
    waiting, seen = [name], set()
    while waiting:
        found = _rule_of(rules, waiting.pop())
        if found is rule:
            return True
        if found.get("name") not in seen:
            seen.add(found.get("name"))
            waiting += [step["fallback"] for step in found.get("overflow", ()) if step != "compress"]
    return False


def _pairs(objects: Any) -> Iterable[tuple[Any, Any]]:
    """Return the members of all *objects* of a list; none of what is no list or no object."""
    if not isinstance(objects, list):
        return ()
    return [pair for value in objects if isinstance(value, dict) for pair in value.items()]


def _add_fallback(rule: dict[str, Any], steps: list[Any], key: str) -> None:
    """Add the *steps* of LiteLLM's list *key* to those that *rule* has: here they are one list for all reasons."""
    if not steps:
        return
    known = rule.get("overflow", [])
    added = [step for step in steps if step not in known]
    rule["overflow"] = [*added, *(known or ["compress"])]
    reasons = list(FALLBACKS[key])
    if known:
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
        if section == "model_list":
            continue
        if not isinstance(value, dict):
            yield f"{section}: no counterpart"
            continue
        for key in value.keys() - converted.get(section, set()):
            yield f"{section}.{key}: no counterpart"


def _section(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object called *name* in *value*; an empty one if there is none."""
    section = value.get(name)
    if isinstance(section, dict):
        return section
    return {}


def _value(text: str) -> str:
    """Return *text* with ``os.environ/NAME`` as it is written here."""
    return _VARIABLE.sub(r"${\1}", text)


def to_yaml(conversion: Conversion) -> str:
    """Return the configuration as the text of a file."""
    return yaml.safe_dump(conversion.sections, sort_keys=False, allow_unicode=True, width=120)


def variables_in(text: str) -> list[str]:
    """Return the environment variables that a configuration names."""
    return sorted(set(re.findall(r"\$\{(\w+)\}", text)))
