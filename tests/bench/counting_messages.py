"""Messages of every kind that is hard to count, and what OpenAI's own tokenizer makes of them."""

from __future__ import annotations

import base64
import functools
import json
import os
import random
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tiktoken
from tiktoken import registry

from proxy.tokenizers import packaged_vocabularies
from tests.support import recorded_conversations
from tests.support.proxy_process import ROOT
from tests.support.sample_conversations import agent_round, chat_turn, prose

Message = dict[str, Any]

CJK = (
    "不要修改数据库结构,除非测试全部通过。",
    "検索結果は三件です。次のページを開いてください。",
    "한국어 문장을 하나 더 읽고 요약해 주세요.",
    "請把這個檔案移到新的資料夾裡,然後再執行一次。",
)


@functools.cache
def original(encoding: str) -> tiktoken.Encoding:
    """tiktoken's encoding with its own pattern; the one that the proxy registers has a faster pattern."""
    tiktoken.list_encoding_names()  # finds the constructors
    assert registry.ENCODING_CONSTRUCTORS is not None
    with patch.dict(os.environ, {"TIKTOKEN_CACHE_DIR": str(packaged_vocabularies())}):
        return tiktoken.Encoding(**registry.ENCODING_CONSTRUCTORS[encoding]())


def cjk(seed: int, characters: int) -> str:
    """Chinese, Japanese and Korean text of *characters* characters."""
    pick = random.Random(seed)
    return "".join(chain.from_iterable(pick.choice(CJK) for _ in range(characters // 16 + 1)))[:characters]


def noise(seed: int, characters: int) -> str:
    """The base64 of random bytes."""
    return base64.b64encode(random.Random(seed).randbytes(characters * 3 // 4 + 3)).decode()[:characters]


def code(seed: int, characters: int) -> str:
    """Source text of this project, of files in a random order."""
    files = sorted(Path(ROOT, "proxy").rglob("*.py"))
    taken = random.Random(seed).sample(files, min(len(files), 3 + characters // 4_000))
    text = "".join(file.read_text() for file in taken)
    return (text * (characters // len(text) + 1))[:characters]


ODD = ("<|endoftext|>", " " * 300, "\n" * 40, "a" * 500, "👩🏽‍💻", "\ud83d", "naïve\u0301", "\t\t x", "0" * 90, "ﷺ")


def odd(seed: int) -> str:
    """Text that tokenizers have stumbled over."""
    return "".join(random.Random(seed).choices(ODD, k=12))


def recorded() -> Iterator[Message]:
    """Messages of recorded conversations, where they are at hand."""
    yield from (dict(message) for found in recorded_conversations.read_all() for message in found.messages)


def made() -> Iterator[Message]:
    """Generated messages without end, a few of each kind in turn."""
    seed = 0
    while True:
        seed += 1
        yield {"role": "user", "content": cjk(seed, 200 + seed % 900)}
        yield {"role": "tool", "tool_call_id": f"call_{seed}", "content": noise(seed, 300 + seed % 2_000)}
        yield {"role": "assistant", "content": f"```python\n{code(seed, 800)}\n```"}
        yield {
            "role": "user",
            "content": [{"type": "text", "text": odd(seed)}, {"type": "text", "text": prose(seed, 60)}],
        }
        yield {"role": "user", "name": f"user_{seed}", "content": odd(seed + 1)}
        yield {"role": "assistant", "content": None, "reasoning_content": prose(seed, 50), "refusal": None}
        yield from chat_turn(seed, 80)
        yield from agent_round(seed, 150, parallel=1 + seed % 3)


def messages(count: int) -> list[Message]:
    """*count* messages: at most half of them recorded ones, spread over all recordings, the rest generated."""
    real = list(recorded())
    step = max(1, len(real) // max(1, count // 2))
    taken = real[::step][: count // 2]
    return [*taken, *islice(made(), count - len(taken))]


def reference(encoding: tiktoken.Encoding, message: Message) -> int:
    """Tokens of *message* by tiktoken alone: every text it holds, and the frames that OpenAI documents."""

    def size(value: Any) -> int:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        sound = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return len(encoding.encode(sound, disallowed_special=()))

    content = message.get("content")
    total = 4 + sum(size(part["text"]) for part in content) if isinstance(content, list) else 4 + size(content or "")
    legacy = message.get("function_call")
    calls = [call["function"] for call in message.get("tool_calls") or ()] + ([legacy] if legacy else [])
    total += sum(4 + size(call["name"]) + size(call["arguments"]) for call in calls)
    total += sum(size(call["id"]) for call in message.get("tool_calls") or ())
    told = {k: v for k, v in message.items() if k not in ("role", "content", "tool_calls", "function_call") and v}
    return total + sum(map(size, told.values())) + ("name" in told)
