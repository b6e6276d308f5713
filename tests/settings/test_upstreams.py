"""Upstreams, models and the words of overflows: what is refused, and what carries a key."""

import pytest

from proxy.settings import load, open_proxy_problem
from proxy.settings.upstreams import Model, Upstream
from tests.support.settings_files import problems, write_settings


def test_what_carries_a_key():
    """An upstream is sent a key of its own through api_key or through a header that holds one."""
    plain = {"name": "a", "base_url": "http://h"}
    assert not Upstream.model_validate({**plain, "headers": {"x-team": "red"}}).carries_key
    assert Upstream.model_validate({**plain, "api_key": "k"}).carries_key
    assert Upstream.model_validate({**plain, "headers": {"Api-Key": "k"}}).carries_key


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("{means: input}", "a phrase or a code"),
        ('{phrase: "a b", code: c}', "a phrase or a code"),
        ('{phrase: "{window} tokens"}', "{window}"),
        ('{phrase: "*"}', "1 to 300"),
        ('{code: "--"}', "no letter or digit"),
        ('{phrase: "a b", means: joy}', "means"),
    ],
)
def test_rules_of_overflows_are_checked(tmp_path, rule, complaint):
    """A rule that could never match, or would match anything, is refused where it stands."""
    found = problems(tmp_path, f"overflow_rules: [{rule}]")
    assert any(complaint in f"{one.key} {one.message}" for one in found)


def test_rules_of_overflows(tmp_path):
    """A phrase or a code with what it means, and who says so."""
    text = 'overflow_rules: [{phrase: "over {limit}", source: us}, {code: E1, means: other}]'
    first, second = load(write_settings(tmp_path, text), {}, {}).overflow_rules
    assert (first.means, first.phrase, first.source) == ("input", "over {limit}", "us")
    assert (second.means, second.code, second.source) == ("other", "E1", "configured")


def test_providers(tmp_path):
    """A provider needs no address; OpenAI's does; LiteLLM's options mean nothing without one."""
    assert (
        not load(write_settings(tmp_path, "upstreams: [{name: a, provider: gemini}]\n"), {}, {}).upstreams[0].base_url
    )
    assert "is required" in str(problems(tmp_path, "upstreams: [{name: a}]\n"))
    assert "without a provider" in str(
        problems(tmp_path, "upstreams: [{name: a, base_url: http://x, options: {b: c}}]\n")
    )


@pytest.mark.parametrize("provider", ["bedrock", "vertex_ai", "sagemaker"])
def test_what_the_surroundings_pay_for_is_guarded(tmp_path, provider):
    """An upstream that is paid by the machine's own role is as good as one with a key of its own."""
    text = f"server: {{host: 0.0.0.0}}\nupstreams: [{{name: a, provider: {provider}}}]\n"
    assert "key of a" in open_proxy_problem(load(write_settings(tmp_path, text), {}, {}))


def test_a_model_matches_by_name_or_glob():
    """A rule is about the name it bears, its own brackets included, and about what its glob matches; case counts."""
    assert Model(name="gpt-5*").matches("gpt-5-mini")
    assert not Model(name="gpt-5*").matches("GPT-5-mini")
    assert Model(name="odd[1]").matches("odd[1]")


@pytest.mark.parametrize(
    ("name", "model", "is_valid"),
    [("openai/*", "*", True), ("*", "x-*", True), ("gpt", "*", False), ("a*b*", "*", False), ("a*?", "*", False)],
)
def test_a_star_in_a_models_name_needs_one_to_stand_for(tmp_path, name, model, is_valid):
    """It means what the one in the rule's name matches: a rule where it could mean nothing else is refused."""
    upstreams = "upstreams: [{name: a, base_url: http://h/v1}]\n"
    text = f'{upstreams}models: [{{name: "{name}", model: "{model}"}}]\n'
    if is_valid:
        rule = load(write_settings(tmp_path, text), {}, {}).models[0]
        assert rule.serves(rule.name_at_upstream(name.replace("*", "gpt-4o")))
    else:
        (problem,) = problems(tmp_path, text)
        assert "means nothing beside" in problem.message


def test_a_forward_proxys_password_is_a_secret(tmp_path):
    """Neither the settings nor an error about a proxy's URL repeats it; an empty one is none."""
    upstream = "upstreams: [{name: a, base_url: 'https://h', proxy: '%s'}]\n"
    settings = load(write_settings(tmp_path, upstream % "http://me:pass-word@h:3128"), {}, {})
    assert settings.upstreams[0].proxy.get_secret_value() == "http://me:pass-word@h:3128"
    assert "pass-word" not in repr(settings)
    assert load(write_settings(tmp_path, upstream % ""), {}, {}).upstreams[0].proxy is None
    for wrong in ("http://me:pass-word@h:port", "http://me:pass-word@h/path", "http://me:pass-word@", "https://h"):
        problem = str(problems(tmp_path, upstream % wrong))
        assert "no http URL of a proxy" in problem
        assert "pass-word" not in problem
