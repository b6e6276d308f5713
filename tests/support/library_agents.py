"""Agents as users write them, one for each library: ``python -m tests.support.library_agents langchain URL``.

Each asks through its library's own loop, offers one tool, streams if the library does, and prints how many tool calls
it served and the last words of the model. Nothing is imported but the standard library and the agent's own, so that
the interpreter may be one of another environment.
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
        """Read a file of the repository.

        Args:
            path: Path from the root of the repository.
        """
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


async def smolagents(url: str, files: Files) -> str:
    """A smolagents agent that calls tools; it ends with a call of its own."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    def read_file(path: str) -> str:
        """Read a file of the repository.

        Args:
            path: Path from the root of the repository.
        """
        return files.read_file(path)

    model = OpenAIServerModel(MODEL, api_base=url, api_key=KEY, client_kwargs={"max_retries": 0})
    agent = ToolCallingAgent(tools=[tool(read_file)], model=model, max_steps=30, stream_outputs=True)
    return str(await asyncio.to_thread(agent.run, AGENT_TASK))


async def llama_index(url: str, files: Files) -> str:
    """LlamaIndex's agent, whose events are watched."""
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.memory import ChatMemoryBuffer
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL, api_base=url, api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_retries=0
    )
    memory = ChatMemoryBuffer.from_defaults(token_limit=10_000_000, tokenizer_fn=str.split)
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(fn=files.read_file)], llm=model, system_prompt=AGENT_SYSTEM)
    run = agent.run(AGENT_TASK, memory=memory, max_iterations=60)
    async for _ in run.stream_events():
        pass
    return str(await run)


async def llm(url: str, files: Files) -> str:
    """A chain of ``llm``, streaming."""
    from llm.default_plugins.openai_models import Chat

    model = Chat(model_id="ullage", model_name=MODEL, api_base=url, supports_tools=True)
    conversation = model.conversation(tools=[files.read_file], chain_limit=100)
    chain = conversation.chain(AGENT_TASK, system=AGENT_SYSTEM, key=KEY, stream=True)
    responses = await asyncio.to_thread(lambda: list(chain.responses()))
    return str(responses[-1].text())


async def openai_agents(url: str, files: Files) -> str:
    """An agent of OpenAI's Agents SDK over the Responses API, streaming."""
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIResponsesModel(model=MODEL, openai_client=AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0))
    agent = Agent(name="reader", instructions=AGENT_SYSTEM, model=model, tools=[function_tool(files.read_file)])
    run = Runner.run_streamed(agent, AGENT_TASK, max_turns=60)
    async for _ in run.stream_events():
        pass
    return str(run.final_output)


async def strands(url: str, files: Files) -> str:
    """A Strands agent over Anthropic's API, which does not shorten its history itself."""
    from strands import Agent, tool
    from strands.agent.conversation_manager import NullConversationManager
    from strands.models.anthropic import AnthropicModel

    client = {"api_key": KEY, "base_url": url.removesuffix("/v1"), "max_retries": 0}
    model = AnthropicModel(client_args=client, model_id="claude-sonnet-4-5", max_tokens=400)
    keeper = NullConversationManager()
    agent = Agent(
        model=model,
        tools=[tool(files.read_file)],
        system_prompt=AGENT_SYSTEM,
        callback_handler=None,
        conversation_manager=keeper,
    )
    return str(await agent.invoke_async(AGENT_TASK)).strip()


async def google_adk(url: str, files: Files) -> str:
    """An agent of Google's ADK over Gemini's API, streaming."""
    os.environ.update(GOOGLE_API_KEY=KEY, GOOGLE_GEMINI_BASE_URL=url.removesuffix("/v1"))
    from google.adk.agents import LlmAgent
    from google.adk.agents.run_config import RunConfig, StreamingMode
    from google.adk.runners import InMemoryRunner
    from google.genai.types import Content, Part

    agent = LlmAgent(name="reader", model="gemini-2.5-pro", instruction=AGENT_SYSTEM, tools=[files.read_file])
    runner = InMemoryRunner(agent=agent, app_name="reading")
    session = await runner.session_service.create_session(app_name="reading", user_id="user")
    asked = Content(role="user", parts=[Part(text=AGENT_TASK)])
    settings = RunConfig(max_llm_calls=100, streaming_mode=StreamingMode.SSE)
    last = ""
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=asked, run_config=settings):
        if event.content and event.content.parts and event.content.parts[0].text:
            last = event.content.parts[0].text
    return last


async def autogen(url: str, files: Files) -> str:
    """An assistant of AutoGen, streaming."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(model=MODEL, base_url=url, api_key=KEY, max_retries=0)
    agent = AssistantAgent(
        "reader",
        model_client=client,
        tools=[files.read_file],
        system_message=AGENT_SYSTEM,
        max_tool_iterations=60,
        model_client_stream=True,
    )
    return str((await agent.run(task=AGENT_TASK)).messages[-1].content)


async def haystack(url: str, files: Files) -> str:
    """An agent of Haystack, streaming."""
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(
        model=MODEL,
        api_base_url=url,
        api_key=Secret.from_token(KEY),
        max_retries=0,
        streaming_callback=lambda _chunk: None,
    )
    tools = [create_tool_from_function(files.read_file)]
    agent = Agent(chat_generator=generator, tools=tools, system_prompt=AGENT_SYSTEM, max_agent_steps=100)
    ended = await asyncio.to_thread(agent.run, messages=[ChatMessage.from_user(AGENT_TASK)])
    return str(ended["messages"][-1].text)


INSTALLED = (langchain, litellm, pydantic_ai, pydantic_ai_responses)
"""Those whose libraries the tests install."""
OTHERS = (smolagents, llama_index, llm, openai_agents, strands, google_adk, autogen, haystack)
"""Those that need an environment of their own."""
AGENTS = {each.__name__: each for each in (*INSTALLED, *OTHERS)}


def main() -> None:
    """Run the agent that is named, and tell what came of it."""
    files = Files()
    answer = asyncio.run(AGENTS[sys.argv[1]](sys.argv[2], files))
    print(json.dumps({"read": files.read, "said": answer}))


if __name__ == "__main__":
    main()
