"""The library form: it needs no server, and gives what the route gives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.api import ContextTooLong, Fitter, InvalidRequest, SettingsError, fit, fit_async
from proxy.tokenizers import Tokenizers
from tests.support.sample_conversations import AGENT_SYSTEM, AGENT_TASK, agent_round

WINDOW = 8_192


def request(rounds: int) -> dict[str, Any]:
    """A chat request of so many rounds of some 330 tokens."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": AGENT_SYSTEM},
        {"role": "user", "content": AGENT_TASK},
    ]
    for number in range(rounds):
        messages += agent_round(number, 300)
    return {"model": "gpt-4o", "messages": messages, "temperature": 0.5}


def test_a_request_is_fitted_without_a_server() -> None:
    """The body is the request's own but for its items, and the figures say what was done."""
    whole = request(40)
    fitted = fit(whole, window=WINDOW)
    assert (fitted.outcome, fitted.stages, fitted.window) == ("compacted", ("fold",), WINDOW)
    assert fitted.tokens_after < WINDOW < fitted.tokens_before
    assert fitted.body == {**whole, "messages": fitted.messages}
    assert len(fitted.messages) < len(whole["messages"])


@pytest.mark.parametrize("rounds", [1, 40])
def test_a_text_that_was_cut_inside_a_character_stays_as_it_is(rounds: int) -> None:
    """Half a character in Python's text is half a character in the result, fitted or not."""
    whole = request(rounds)
    whole["messages"].append({"role": "user", "content": "cut here: \ud83d"})
    fitted = fit(whole, window=WINDOW)
    assert fitted.outcome == ("verbatim" if rounds == 1 else "compacted")
    assert fitted.messages[-1] == whole["messages"][-1]


async def test_a_refused_request_changes_no_later_view() -> None:
    """What was dropped in vain, for a window that the newest round alone exceeds, is no fact of the conversation."""
    whole = request(40)
    async with Fitter() as fitter:
        with pytest.raises(ContextTooLong):
            await fitter.fit(whole, window=9)
        after = await fitter.fit(whole, window=WINDOW)
    assert after == await fit_async(whole, window=WINDOW)


def test_a_vocabulary_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request of a program counts by what the first one loaded."""
    first = fit(request(40), window=WINDOW)
    monkeypatch.setattr(Tokenizers, "_load", None)
    assert fit(request(40), window=WINDOW) == first


def test_what_fits_is_returned_as_it_is() -> None:
    """The window of a known model is the packaged one."""
    fitted = fit(request(2))
    assert (fitted.outcome, fitted.body, fitted.window) == ("verbatim", request(2), 128_000)


async def test_a_fitter_keeps_the_beginning_of_a_conversation() -> None:
    """A compacted beginning has the same words later, and a share as target compacts at once."""
    async with Fitter() as fitter:
        first = await fitter.fit(request(40), window=WINDOW)
        second = await fitter.fit(request(42), window=WINDOW)
        small = await fitter.fit(request(15), window=WINDOW, target=0.2, conversation="other")
    assert second.messages[: len(first.messages)] == first.messages
    assert small.outcome == "compacted"


async def test_items_can_all_stay() -> None:
    """There are as many as before."""
    fitted = await fit_async(request(40), window=WINDOW, keep_items=True)
    assert len(fitted.messages) == len(request(40)["messages"])
    assert fitted.tokens_after < WINDOW


def test_errors_are_those_of_the_proxy(tmp_path: Path) -> None:
    """No request, no room and no file: each has its own exception."""
    with pytest.raises(InvalidRequest, match="Send messages"):
        fit({"model": "m"})
    with pytest.raises(InvalidRequest, match="target"):
        fit(request(1), target=0)
    with pytest.raises(ContextTooLong, match="system messages"):
        fit({"model": "m", "messages": [{"role": "system", "content": "x " * 3_000}]}, window=1_000)
    with pytest.raises(SettingsError, match="cannot be read"):
        fit(request(1), config=tmp_path / "none.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["", "\ud83d"])
def test_messages_may_be_the_objects_of_an_sdk(cut: str) -> None:
    """What a client returned is appended as it is, and is sent as the SDK would send it."""
    from openai.types.chat import ChatCompletionMessage

    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answer = ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    result = {"role": "tool", "tool_call_id": "c1", "content": f"found{cut}"}
    user = {"role": "user", "content": "Look."}
    fitted = fit({"model": "gpt-4o", "messages": [user, answer, result]})
    assert fitted.messages == [user, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


def test_what_is_no_json_and_no_option_is_refused() -> None:
    """An object of another kind, and an option that is misspelled: it would be sent to the provider."""
    with pytest.raises(InvalidRequest, match="PosixPath is no type"):
        fit({"model": "gpt-4o", "messages": [{"role": "user", "content": Path("x")}]})
    with pytest.raises(TypeError, match="no option widow"):
        fit(request(1), widow=5)  # type: ignore[call-arg]


def test_an_unopened_fitter_says_so() -> None:
    """It has to be entered before it is used."""
    with pytest.raises(RuntimeError, match="async with"):
        asyncio.run(Fitter().fit(request(1)))


def test_a_file_sets_windows(tmp_path: Path) -> None:
    """The rules of a configuration hold here, too."""
    file = tmp_path / "ullage.yaml"
    file.write_text(
        "upstreams: [{name: a, base_url: 'http://127.0.0.1:1/v1'}]\nmodels: [{name: '*', context_window: 8192}]\n"
    )
    assert fit(request(40), config=file).window == WINDOW
