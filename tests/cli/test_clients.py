"""The clients' settings as data."""

from __future__ import annotations

import pytest

from proxy.cli.clients import ClientFacts, clients, fill_in, filled_settings

FACTS = ClientFacts("http://127.0.0.1:8484", "KEY", "some-model", 32_768, 4_096)
CLIENTS = clients()


def test_every_client_has_settings_or_a_note() -> None:
    """No client is listed without a file, a variable, a command, or the reason why there is none."""
    assert all(each.files or each.environment or each.commands or each.note for each in CLIENTS.values())


@pytest.mark.parametrize("name", CLIENTS)
def test_everything_known_leaves_no_braces_and_names_the_proxy(name: str) -> None:
    """With all facts no placeholder is left over, and every client that has settings gets the address."""
    client = CLIENTS[name]
    values = [str(setting) for file in client.files for setting in filled_settings(file, FACTS)]
    values += [str(fill_in(value, FACTS)) for value in (*client.environment.values(), *client.commands)]
    text = "\n".join(values)
    for placeholder in (
        "{url}",
        "{root}",
        "{model}",
        "{window}",
        "{text_window}",
        "{output}",
        "{key}",
        "{text_output}",
    ):
        assert placeholder not in text
    assert (FACTS.root in text) == (client.api != "none")


@pytest.mark.parametrize("name", [name for name, client in CLIENTS.items() if client.files])
def test_unknown_facts_are_left_out(name: str) -> None:
    """Without model and window no value says ``None`` or a placeholder, and the address is still there."""
    bare = ClientFacts(FACTS.root, "KEY", "m" if CLIENTS[name].needs_model else None)
    text = str([setting for file in CLIENTS[name].files for setting in filled_settings(file, bare)])
    text += str(fill_in(CLIENTS[name].environment, bare))
    assert "None" not in text
    assert "{window}" not in text
    assert FACTS.root in text


def test_a_figure_that_stands_alone_is_a_number() -> None:
    """The window is a number where it is the whole value, a text where it is part of one or requested as one."""
    assert fill_in("{window}", FACTS) == 32_768
    assert fill_in("{text_window}", FACTS) == "32768"
    assert fill_in({"a": "n={window}", "b": ["{output}", "{url}"]}, FACTS) == {
        "a": "n=32768",
        "b": [4_096, f"{FACTS.root}/v1"],
    }


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (ClientFacts("r", "K", "m", 8_192), {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1024", "MAX_THINKING_TOKENS": "0"}),
        (
            ClientFacts("r", "K", "m", 32_768, 32_000),
            {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192", "MAX_THINKING_TOKENS": "4096"},
        ),
        (
            ClientFacts("r", "K", "m", 65_536),
            {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192"}
            | {"MAX_THINKING_TOKENS": "4096"},
        ),
        (
            ClientFacts("r", "K", "m", 131_072),
            {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "131072", "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "131072"}
            | {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "16384", "MAX_THINKING_TOKENS": "8192"},
        ),
        (
            ClientFacts("r", "K", "m", 327_680, None, 32_768),
            {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "327680", "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "327680"}
            | {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096", "MAX_THINKING_TOKENS": "2048"},
        ),
        (ClientFacts("r", "K", "m"), {}),
    ],
)
def test_claude_code_gets_settings_that_it_obeys_in_a_window_of_that_size(
    facts: ClientFacts, expected: dict[str, str]
) -> None:
    """Output and thinking leave room in every window, and only figures that it does not raise are written."""
    (file,) = CLIENTS["claude-code"].files
    env = {str(change.at[1]): change.value for change in filled_settings(file, facts) if change.at[0] == "env"}
    assert env.pop("ANTHROPIC_BASE_URL") == "r"
    assert env == expected


def test_a_roomy_window_leaves_the_answers_length_to_the_real_one() -> None:
    """The longest answer follows from the model's own window, not from the one that the client assumes."""
    assert fill_in("{output}", ClientFacts("r", "K", "m", 81_920, None, 8_192)) == 1_024
