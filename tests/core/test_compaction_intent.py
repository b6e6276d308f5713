"""The words of a request for a summary, in several languages, and those of requests that resemble it."""

from __future__ import annotations

import pytest

from proxy.core.compaction_intent import (
    HEAD,
    TAIL,
    is_summariser,
    requests_continuation,
    requests_handover,
    requests_recap,
    requests_text_only,
    requests_title,
)

CHAT = "Ann: did you read it?\nBob: I did, it is fine.\n" * 100


@pytest.mark.parametrize(
    "text",
    [
        "Sum up this session so that a new agent can resume it: write a summary of all that matters.",
        "Distill the transcript into notes; they will be the only memory you have.",
        CHAT + "\n\nCondense these messages so that the work can continue.",
        "Compress the conversation below without losing decisions.\n\n" + CHAT,
        "请总结到目前为止的对话，以便继续工作。",
    ],
)
def test_a_wish_to_go_on_is_found_at_either_end(text: str) -> None:
    """The intent is recognised at the head or at the tail, before or behind a conversation."""
    assert requests_continuation(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Continue with the session.",
        "Write a function that summarizes the history and continues.",
        "What does this do?\nsummarize the conversation so that it continues",
        "Is the summary of the conversation continued below?",
        "Translate: summarize the conversation to continue it.",
        "Another language model started on this and wrote a summary of the conversation; continue from it.",
        "写一个函数，压缩对话历史，以便继续。",
    ],
)
def test_other_deeds_are_no_wish_to_go_on(text: str) -> None:
    """Code, questions, translations and summaries that are handed on name the same things and want another."""
    assert not requests_continuation(text)


def test_with_tools_the_reader_must_be_elsewhere() -> None:
    """If tools may be called, a wish to go on must say that its answer is read elsewhere or calls nothing."""
    assert requests_text_only("Write a summary of this session for the next agent.")
    assert requests_text_only("Summarize the conversation. Do not call any tools.")
    assert not requests_text_only("Write a summary of this session and continue.")
    assert not requests_text_only("x" * HEAD + " Write a summary of this session for the next agent.")


def test_a_recap_is_of_the_conversation_it_stands_in() -> None:
    """A pasted conversation, and the history of something else, are not."""
    assert requests_recap("Summarize our chat so far.", has_history=False)
    assert requests_recap(
        "Summarize our chat so far: what we did, what is left and what we wanted to do.", has_history=True
    )
    assert not requests_recap("Summarize this chat:\n\n" + CHAT, has_history=False)
    assert not requests_recap("Summarize the history of Rome.", has_history=True)


def test_a_summariser_is_one_by_its_role() -> None:
    """The first words of a system text say so; before a history it must also say that things go on."""
    assert is_summariser("You are an assistant that condenses conversations.", has_history=False)
    assert not is_summariser("You are an assistant that condenses conversations.", has_history=True)
    assert is_summariser(
        "You condense chats.\nYour task is to summarize a chat so that it can continue.", has_history=True
    )
    assert not is_summariser("You are a coding agent. Keep the conversation short.", has_history=False)
    assert not is_summariser("You are a judge of how well a summary tells a conversation.", has_history=False)


def test_only_both_ends_are_looked_at() -> None:
    """The middle of a long text is no request, and reading it costs nothing."""
    wish = " Write a summary of this session so that it can be resumed. "
    assert requests_continuation("x " * 100 + wish)
    assert not requests_continuation("x " * HEAD + wish + "x " * TAIL)


def test_a_title_is_requested_by_the_system_text() -> None:
    """What names a conversation is no summary from which it continues."""
    assert requests_title("You write a title for each conversation.")
    assert not requests_title("You are a coding agent.")


@pytest.mark.parametrize(
    ("text", "is_requested"),
    [
        ("Write up where things stand so that another engineer can take over.", True),
        ("Schreibe alles auf, damit eine andere Kollegin übernehmen kann.", True),
        ("The context window is nearly full. Note down what is needed.", True),
        ("Is there another engineer who can take over?", False),
        ("Document the module so that another engineer can take over.", False),
        ("Here is what another engineer needs to take over.", False),
        ("Let another engineer take over. " + "x " * HEAD, False),
        ("This session is being continued from a previous one. Another agent took over.", False),
    ],
)
def test_a_handover_names_who_takes_over_or_why(text: str, is_requested: bool) -> None:
    """A short request is one, a question, other work, a finished summary or a long text is not."""
    assert requests_handover(text) == is_requested


def test_a_message_with_a_finished_summary_requests_none() -> None:
    """A client that continues from its own summary does not request another."""
    summary = "This session is being continued from a previous conversation that ran out of context. " + "x " * 2_000
    assert not requests_continuation(summary + "Continue the conversation without asking; the summary replaces it.")
