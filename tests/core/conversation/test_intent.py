"""What a text asks for: what is needed to go on elsewhere, a recap, or something else."""

from __future__ import annotations

import pytest

from proxy.core.conversation.intent import (
    HEAD,
    TAIL,
    asks_elsewhere,
    asks_recap,
    asks_to_go_on,
    is_summariser,
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
    """What is made, of what and what for: at the head or at the tail, before or behind a conversation."""
    assert asks_to_go_on(text)


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
    assert not asks_to_go_on(text)


def test_with_tools_the_reader_must_be_elsewhere() -> None:
    """If tools may be called, a wish to go on must say that its answer is read elsewhere or calls nothing."""
    assert asks_elsewhere("Write a summary of this session for the next agent.")
    assert asks_elsewhere("Summarize the conversation. Do not call any tools.")
    assert not asks_elsewhere("Write a summary of this session and continue.")
    assert not asks_elsewhere("x" * HEAD + " Write a summary of this session for the next agent.")


def test_a_recap_is_of_the_conversation_it_stands_in() -> None:
    """A pasted conversation, and the history of something else, are not."""
    assert asks_recap("Summarize our chat so far.", history=False)
    assert asks_recap("Summarize our chat so far: what we did, what is left and what we wanted to do.", history=True)
    assert not asks_recap("Summarize this chat:\n\n" + CHAT, history=False)
    assert not asks_recap("Summarize the history of Rome.", history=True)


def test_a_summariser_is_one_by_its_role() -> None:
    """The first words of a system text say so; before a history it must also say that things go on."""
    assert is_summariser("You are an assistant that condenses conversations.", history=False)
    assert not is_summariser("You are an assistant that condenses conversations.", history=True)
    assert is_summariser("You condense chats.\nYour task is to summarize a chat so that it can continue.", history=True)
    assert not is_summariser("You are a coding agent. Keep the conversation short.", history=False)
    assert not is_summariser("You are a judge of how well a summary tells a conversation.", history=False)


def test_only_both_ends_are_looked_at() -> None:
    """What stands in the middle of a long text is told by somebody else, and costs nothing."""
    wish = " Write a summary of this session so that it can be resumed. "
    assert asks_to_go_on("x " * 100 + wish)
    assert not asks_to_go_on("x " * HEAD + wish + "x " * TAIL)
