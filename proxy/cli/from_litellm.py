"""Converts the configuration of LiteLLM's proxy into one of ours, and names what has no counterpart.

Its keys are those of https://docs.litellm.ai/docs/proxy/config_settings.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    {"model", "api_base", "base_url", "api_key", "extra_headers", "timeout", "stream_timeout"}
)
"""Members of ``litellm_params`` that are converted."""

OPTIONS: Final = frozenset({"api_version", "aws_region_name", "vertex_project", "vertex_location", "region_name"})
"""Members of ``litellm_params`` that go to ``upstreams[].options``."""

FIGURES: Final = {"max_input_tokens": "context_window", "max_output_tokens": "max_output_tokens"}
"""Members of ``model_info`` that are converted, with their names here."""

IGNORED_FACTS: Final = frozenset({"id", "mode", "max_tokens", "base_model", "description"})
"""Members of ``model_info`` that change nothing here."""

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
    for index, entry in enumerate(config["model_list"]):
        if isinstance(entry, dict):
            _add_model(conversion, entry, f"model_list[{index}]")
        else:
            conversion.notes.append(f"model_list[{index}]: is no model")
    conversion.models.sort(key=_precedence)
    for section, key in product(("litellm_settings", "router_settings"), FALLBACKS):
        _add_fallbacks(conversion, _section(config, section).get(key), f"{section}.{key}")
    general = _section(config, "general_settings")
    if general.get("master_key"):
        conversion.server["access_keys"] = [_value(str(general["master_key"]))]
        conversion.notes.append(
            "general_settings.master_key: one of server.access_keys; virtual keys have no counterpart"
        )
    conversion.notes += sorted(_without_counterpart(config))
    return conversion


def _add_model(conversion: Conversion, entry: Mapping[str, Any], path: str) -> None:
    """Add the rule and the upstream of one *entry* of ``model_list``, which stands at *path*."""
    name, params = str(entry.get("model_name", "")), _section(entry, "litellm_params")
    litellm_model = str(params.get("model", ""))
    if not name or not litellm_model:
        conversion.notes.append(f"{path}: has no model_name or no litellm_params.model")
        return
    if any(rule["name"] == name for rule in conversion.models):
        conversion.notes.append(f"{path}: a second {name}: requests are not balanced; the first one is taken")
        return
    provider, model = _split(litellm_model)
    upstream = _upstream_of(provider, params)
    if provider in OWN_API and "base_url" not in upstream:
        conversion.notes.append(f"{path}: {provider} needs an api_base here")
        return
    facts = _section(entry, "model_info")
    conversion.models.append(
        {"name": name, "upstream": _add_upstream(conversion, provider, upstream), **_figures(name, model, facts)}
    )
    if "*" in name and name != "*":
        conversion.notes.append(
            f"{path}: models that match {name} keep their whole name; LiteLLM takes the provider off"
        )
    conversion.notes += [f"{path}.{key}: no counterpart" for key in _unknown_keys(params, facts)]


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


def _unknown_keys(params: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Return the members of ``litellm_params`` and ``model_info`` that are not converted."""
    unknown = [f"litellm_params.{key}" for key in params.keys() - (PARAMETERS | OPTIONS)]
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
    if headers := _texts(_section(params, "extra_headers")):
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


def _add_fallbacks(conversion: Conversion, fallbacks: Any, path: str) -> None:
    """Add the list at *path*: objects from a model to the models that are asked instead."""
    rules = {rule["name"]: rule for rule in conversion.models}
    for model, others in _pairs(fallbacks):
        if model not in rules or not isinstance(others, list):
            conversion.notes.append(f"{path}: there is no model {model}")
            continue
        steps = []
        for name in dict.fromkeys(map(str, others)):
            if _leads_back(conversion.models, rules[model], name):
                conversion.notes.append(f"{path}: {model} to {name} leads in a circle")
            else:
                steps.append({"fallback": name})
        _add_fallback(rules[model], steps, path.partition(".")[2])


def _leads_back(rules: Sequence[Mapping[str, Any]], rule: Mapping[str, Any], name: str) -> bool:
    """True if *rule* is that of the model *name*, or of a model that its fallbacks lead to."""

    def rule_of(model: str) -> Mapping[str, Any]:
        return next((each for each in rules if fnmatch.fnmatchcase(model, each["name"])), {})

    waiting, seen = [name], set()
    while waiting:
        found = rule_of(waiting.pop())
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
    return [pair for each in objects if isinstance(each, dict) for pair in each.items()]


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
    fallbacks = set(FALLBACKS)
    converted = {
        "litellm_settings": fallbacks,
        "router_settings": fallbacks,
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
