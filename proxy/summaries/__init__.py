"""Summaries by a model: background jobs, calls, verification, spending limits."""

from proxy.summaries.jobs import JobCaches, Jobs, OnNote, OnReport, ignore_note
from proxy.summaries.limits import SpendingLimits, SummaryConfig
from proxy.summaries.model_call import credentials, is_subscription_key
from proxy.summaries.prompts import load_prompts
from proxy.summaries.writer import Writer

__all__ = [
    "JobCaches",
    "Jobs",
    "OnNote",
    "OnReport",
    "SpendingLimits",
    "SummaryConfig",
    "Writer",
    "credentials",
    "ignore_note",
    "is_subscription_key",
    "load_prompts",
]
