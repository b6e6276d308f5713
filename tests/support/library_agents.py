"""Agents as users write them, one for each library: ``python -m tests.support.library_agents langchain URL``.

Each asks through its library's own loop, offers one tool, streams if the library does, and prints how many tool calls
it served and the last words of the model.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterable
from typing import Any

from tests.support.sample_conversations import AGENT_SYSTEM, AGENT_TASK, AGENT_TOOLS, log

MODEL = "gpt-4o-mini"
KEY = "sk-test-0123456789abcdef"
RESULT = 400
"""Tokens of a tool's result."""


class Files:
    """The tool: every file is a log of its own."""

    def __init__(self) -> None:
        self.read = 0

    def read_file(self, path: str) -> str:
        """Read a file of the repository."""
        assert path.startswith("src/")
        self.read += 1
        return log(self.read, RESULT)


async def langchain(url: str, files: Files) -> str:
    """LangChain's chat model for OpenAI, streaming, with its own messages and tool calls."""
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=url, api_key=KEY, max_retries=0, stream_usage=True)
    agent = model.bind_tools(AGENT_TOOLS)
    history: list[Any] = [SystemMessage(AGENT_SYSTEM), HumanMessage(AGENT_TASK)]
    while True:
        pieces = [piece async for piece in agent.astream(history)]
        answer = pieces[0]
        for piece in pieces[1:]:
            answer += piece
        assert answer.usage_metadata["input_tokens"] > 0
        history.append(answer)
        if not answer.tool_calls:
            return str(answer.content)
        history += [ToolMessage(files.read_file(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]


async def litellm(url: str, files: Files) -> str:
    """The LiteLLM SDK, streaming, its chunks put together by its own builder."""
    os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_MODE="PRODUCTION")
    import litellm

    history: list[Any] = [{"role": "system", "content": AGENT_SYSTEM}, {"role": "user", "content": AGENT_TASK}]
    given = {"model": f"openai/{MODEL}", "api_base": url, "api_key": KEY, "tools": AGENT_TOOLS, "num_retries": 0}
    while True:
        stream = await litellm.acompletion(
            messages=history, stream=True, stream_options={"include_usage": True}, **given
        )
        whole: Any = litellm.stream_chunk_builder([chunk async for chunk in stream], messages=history)
        answer = whole.choices[0].message
        assert whole.usage.prompt_tokens > 0
        history.append(answer.model_dump())
        if not answer.tool_calls:
            return str(answer.content)
        for call in answer.tool_calls:
            text = files.read_file(**json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def pydantic_ai(url: str, files: Files, api: str = "chat") -> str:
    """A pydantic-ai agent, which loops by itself; every answer is streamed."""
    from openai import AsyncOpenAI
    from pydantic_ai import Agent, UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0))
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    agent = Agent(kind(MODEL, provider=provider), instructions=AGENT_SYSTEM, tools=[files.read_file])

    async def watch(_context: Any, events: AsyncIterable[Any]) -> None:
        async for _ in events:
            pass  # only that somebody watches makes it stream

    result = await agent.run(AGENT_TASK, usage_limits=UsageLimits(request_limit=None), event_stream_handler=watch)
    return str(result.output)


async def pydantic_ai_responses(url: str, files: Files) -> str:
    """The same agent over the Responses API, which is what its plain ``openai:`` models speak."""
    return await pydantic_ai(url, files, "responses")


AGENTS = {each.__name__: each for each in (langchain, litellm, pydantic_ai, pydantic_ai_responses)}


def main() -> None:
    """Run the agent that is named, and tell what came of it."""
    files = Files()
    answer = asyncio.run(AGENTS[sys.argv[1]](sys.argv[2], files))
    print(json.dumps({"read": files.read, "said": answer}))


if __name__ == "__main__":
    main()
