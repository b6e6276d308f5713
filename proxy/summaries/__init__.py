"""Summaries by a model: background jobs, calls, verification, spending limits."""

from proxy.summaries.codec import NOTE_VERSION, SummaryNote, SummaryState
from proxy.summaries.jobs import JobCaches, Jobs, OnNote, OnReport, ignore_note
from proxy.summaries.limits import SpendingLimits, SummaryConfig
from proxy.summaries.model_call import credentials, is_subscription_key
from proxy.summaries.prompts import load_prompts
from proxy.summaries.writer import Writer

__all__ = [
    "NOTE_VERSION",
    "JobCaches",
    "Jobs",
    "OnNote",
    "OnReport",
    "SpendingLimits",
    "SummaryConfig",
    "SummaryNote",
    "SummaryState",
    "Writer",
    "credentials",
    "ignore_note",
    "is_subscription_key",
    "load_prompts",
]
