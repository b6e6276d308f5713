"""The sections ``compression`` and ``summaries``: when a view is made smaller, and how."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from proxy.core.request import TaskSize
from proxy.settings.field_types import (
    AccessKey,
    FieldProblem,
    FilePath,
    OnOff,
    Seconds,
    Section,
    Share,
    SplitText,
    Tokens,
    raise_problems,
)


class Stage(Section):
    """A stage that can be turned off."""

    enabled: bool = True


class DedupStage(Stage):
    """Replaces results that a later one makes superfluous by a line."""

    exact: bool = Field(default=True, description="The same call with the same result.")
    stale_reads: bool = Field(default=True, description="A file that was read again, all the lines or more.")
    grep_subsumed: bool = Field(default=True, description="A search in a file that was read whole later.")
    min_saving: int = Field(default=50, ge=0, description="Least tokens that replacing one result must save.")


class PruneStage(Stage):
    """Replaces old results by a line."""

    protect_rounds: int = Field(default=6, ge=0, description="Newest rounds that stay; fewer in windows below 200K.")
    protect_tokens: int = Field(default=40_000, ge=0, description="Newest tokens of results that stay; scaled alike.")
    min_saving: int = Field(default=20_000, ge=0, description="Least tokens it must save in all; scaled alike.")
    weights: dict[str, Annotated[int, Field(ge=0, le=1000)]] = Field(
        default={}, description="Weights by kind of result; a higher one goes first. Others: as usual."
    )


class TruncateStage(Stage):
    """Cuts the largest remaining results down to a limit."""

    max_bytes: int = Field(default=50_000, ge=1_000, description="Most bytes of a result that was read.")
    share: Annotated[Share, Field(gt=0)] = Field(default=0.10, description="Most of a result, as a share of the room.")


class Stages(Section):
    """The stages that may be used; their order is fixed."""

    dedup: DedupStage = DedupStage.defaults()
    prune: PruneStage = PruneStage.defaults()
    truncate: TruncateStage = TruncateStage.defaults()
    fold: Stage = Stage.defaults()
    drop: Stage = Stage.defaults()
    clip: Stage = Stage.defaults()
    tools: Stage = Stage.defaults()


class Shares(Section):
    """Most that each part of a fold's block may take: pins of the budget, the others of its room for messages."""

    pins: Share = Field(default=0.20, description="User instructions, verbatim.")
    digest: Share = Field(default=0.14, description="Identifiers, paths, errors.")
    steps: Share = Field(default=0.06, description="One line per folded round.")
    summary: Share = Field(
        default=0.05, description="A summary by a model, if there is one; taken out of steps and digest."
    )


class Buffers(Section):
    """Thresholds as tokens free in the window, beside the marks; of the two the smaller threshold holds."""

    reserve: Tokens | None = Field(default=None, description="Reserved for the answer; 16000 is usual.")
    warning: Tokens | None = Field(default=None, description="Free at the soft mark; 24000 is usual.")
    auto_compact: Tokens | None = Field(default=None, description="Free when a compaction starts; 12000 is usual.")
    blocking: Tokens | None = Field(default=None, description="Free in every view that is sent; 3000 is usual.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        order = "Keep blocking < auto_compact < warning; 3000, 12000 and 24000 are usual."
        steps = [(name, getattr(self, name)) for name in ("blocking", "auto_compact", "warning")]
        given = [(name, tokens) for name, tokens in steps if tokens is not None]
        raise_problems(
            [
                ((name,), f"{tokens} is not above {below} ({least})", order)
                for (below, least), (name, tokens) in pairwise(given)
                if tokens <= least
            ]
        )
        return self


ECONOMY_LOW_MARK = 0.35
"""Low mark of the policy ``economy``: the cheapest depth for long sessions at today's prices of cached tokens."""


class Allocation(Section):
    """Soft shares of the window; parts lend what they do not use. All zero: no allocation."""

    system: Share = Field(default=0.0, description="System text and response format.")
    tools: Share = Field(default=0.0, description="Tool definitions; above it they are shrunk before messages go.")
    memory: Share = Field(default=0.0, description="Memories that an agent injects.")
    skills: Share = Field(default=0.0, description="Skills that an agent injects, and its list of them.")
    knowledge: Share = Field(default=0.0, description="Documents that an agent looked up and injects.")
    related: Share = Field(default=0.0, description="Results of other tasks that an agent injects.")
    summary: Share = Field(default=0.0, description="The block in place of folded rounds: its cap in a compaction.")
    recent: Share = Field(default=0.0, description="The newest messages.")
    older: Share = Field(default=0.0, description="Older messages; with recent, what a compaction leaves of messages.")
    reserve: Share = Field(default=0.0, description="The answer; not lent to what a compaction leaves of messages.")

    @property
    def is_configured(self) -> bool:
        """True if any share is set."""
        return any(dict(self).values())

    @model_validator(mode="after")
    def _check(self) -> Self:
        shares = dict(self)
        total = sum(shares.values())
        if total > 1 + 1e-9:
            parts = " + ".join(name for name, share in shares.items() if share)
            message = f"the shares add up to {total:.2f} of the window"
            raise_problems([((), message, f"Keep {parts} at 1 or less together; what is left over is lent.")])
        return self


class Compression(Section):
    """When a view is made smaller, and how."""

    mode: Annotated[Literal["on", "observe", "off"], OnOff] = Field(
        default="on", description="on; observe: decide and report, change nothing; off: relay."
    )
    policy: Literal["fit", "economy"] = Field(
        default="fit",
        description="fit: compact only to fit the window; economy: also if going on costs more.",
    )
    high_mark: Annotated[Share, Field(gt=0)] = Field(default=0.90, description="A compaction starts above this share.")
    soft_mark: Annotated[Share, Field(gt=0)] = Field(default=0.60, description="Preparing may start above this share.")
    low_mark: Annotated[Share, Field(gt=0)] = Field(default=0.40, description="A compaction goes down to this share.")
    low_mark_chats: Annotated[Share, Field(gt=0)] | None = Field(
        default=None, description="Low mark of conversations without tools. None: 0.50 to 0.80, by the size of a round."
    )
    minify: bool = Field(default=True, description="First of all, remove white space from JSON in tool results.")
    lower_output: Literal["last", "first", "never"] = Field(
        default="last", description="When the output limit of a request may be lowered to make room."
    )
    buffers: Buffers = Buffers.defaults()
    stored_history: Literal["truncate", "error"] = Field(
        default="truncate",
        description="If a history that only the provider stores is too long: have it truncated, or pass the error on.",
    )
    stages: Stages = Stages.defaults()
    shares: Shares = Shares.defaults()
    allocation: Allocation = Allocation.defaults()
    sizes: dict[TaskSize, Tokens] = Field(
        default={},
        description="Tokens for the history of a task of each size (x-ullage-task-size); empty: sizes are labels only.",
    )

    @property
    def effective_low_mark(self) -> float:
        """The low mark in force: the configured one, else the policy's."""
        if self.policy == "economy" and "low_mark" not in self.model_fields_set:
            return min(ECONOMY_LOW_MARK, self.low_mark)
        return self.low_mark

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems: list[FieldProblem] = []
        order = "Keep low_mark < soft_mark < high_mark; the defaults are 0.40, 0.60 and 0.90."
        if self.low_mark >= self.high_mark:
            message = f"{self.low_mark} is not below high_mark {self.high_mark}"
            problems.append((("low_mark",), message, order))
        elif not self.low_mark < self.soft_mark < self.high_mark:
            message = f"{self.soft_mark} is not between low_mark {self.low_mark} and high_mark {self.high_mark}"
            problems.append((("soft_mark",), message, order))
        chats = self.low_mark_chats
        if chats is not None and not self.low_mark <= chats < self.soft_mark:
            message = f"{chats} is not from low_mark {self.low_mark} to below soft_mark {self.soft_mark}"
            problems.append((("low_mark_chats",), message, "Leave it out, or keep it between the two; 0.50 is usual."))
        total = self.shares.pins + self.shares.digest + self.shares.steps
        if total > 0.40 + 1e-9:
            remedy = "Keep pins + digest + steps at 0.40 or less."
            problems.append((("shares",), f"the shares add up to {total:.2f} of the budget", remedy))
        if self.shares.summary > self.shares.digest + self.shares.steps:
            remedy = "Keep it at digest + steps or less: that is what it is taken out of."
            problems.append((("shares", "summary"), f"{self.shares.summary} is more than digest and steps", remedy))
        raise_problems(problems)
        return self


class Summaries(Section):
    """Summaries written by a model."""

    mode: Annotated[Literal["background", "inline", "off"], OnOff] = Field(
        default="background",
        description="background: written ahead, used when ready; inline: a compaction waits for it; off: none.",
    )
    model: str = Field(
        default="", description="Model that writes them, served as models says; empty: the request's own model."
    )
    allow: Annotated[tuple[AccessKey, ...], SplitText] = Field(
        default=(), description="Client keys whose conversations may go to model; empty: all."
    )
    allow_file: FilePath | None = Field(default=None, description="File with one such key per line.")
    aligned: bool = Field(
        default=False,
        description="Send the request's own prompt with the instruction behind it, for the provider's prompt cache.",
    )
    timeout: Seconds = Field(default=60.0, description="Most seconds of a call; a compaction waits as long if inline.")
    spend: Share = Field(default=0.10, description="Most tokens, as a share of those a client sent in an hour.")
    jobs: int = Field(default=4, ge=1, le=64, description="Most at a time, in each worker process.")
    subscription_tokens: bool = Field(
        default=False, description="Also with OAuth and subscription tokens, which providers restrict."
    )
