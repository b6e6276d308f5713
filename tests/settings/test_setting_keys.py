"""The keys of a model: which there are, what text may be a list, and what is advised for a wrong one."""

from proxy.settings import Settings
from proxy.settings.setting_keys import ANY_VALUE, SettingKeys

KEYS = SettingKeys(Settings)


def test_a_setting_is_found_behind_lists_and_unions():
    """Entries of a list and the members of a fallback are settings; a key of another section is none here."""
    assert KEYS.has(("models", 0, "overflow", 1))
    assert KEYS.has(("upstreams", 3, "headers", "x-team"))
    assert not KEYS.has(("upstreams", 3, "port"))
    assert not KEYS.has(("serve",))


def test_only_a_list_or_a_section_is_written_in_brackets():
    """A text may begin with a bracket; a setting that is a list is read as one."""
    assert KEYS.is_container(("server", "access_keys"), " [a, b]")
    assert KEYS.is_container(("compression", "shares"), "{pins: 0.1}")
    assert not KEYS.is_container(("server", "access_keys"), "a, b")
    assert not KEYS.is_container(("server", "default_upstream"), "[a]")


def test_a_path_has_no_branch_of_a_union():
    """If pydantic names the branch that it tried, the path ends before that."""
    assert KEYS.setting_path(("models", 0, "unknown_window", "int")) == ("models", 0, "unknown_window")
    assert KEYS.setting_path(("server", "limits", "body")) == ("server", "limits", "body")


def test_an_unknown_key_is_compared_with_those_beside_it_first():
    """A close name of the same section, else the same name elsewhere, else all names of the section."""
    assert KEYS.unknown_key_remedy(("server", "prot")) == "Did you mean 'port'?"
    assert KEYS.unknown_key_remedy(("pins",)) == "Did you mean 'compression.shares.pins'?"
    known = "Known here: log, metrics, traces, budget_log, advice, page."
    assert KEYS.unknown_key_remedy(("telemetry", "zzz")) == known


def test_what_has_no_description_gets_a_general_remedy():
    """A setting is described with its default; the whole of the file has nothing to be described by."""
    assert KEYS.remedy(("server", "port"), "int_parsing", {}).endswith("The default is 8484.")
    assert KEYS.remedy(("nowhere",), "int_parsing", {}) == ANY_VALUE
