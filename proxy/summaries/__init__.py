"""Summaries: asking a model for one, background jobs, spending, single flight over replicas."""

from proxy.summaries.calling import credentials, is_subscription
from proxy.summaries.contracts import Observe, Tell, untold
from proxy.summaries.jobs import Jobs, Memory
from proxy.summaries.prompting import load as load_prompts
from proxy.summaries.spend import Ledger
from proxy.summaries.terms import Terms
from proxy.summaries.writing import Writer

__all__ = [
    "Jobs",
    "Ledger",
    "Memory",
    "Observe",
    "Tell",
    "Terms",
    "Writer",
    "credentials",
    "is_subscription",
    "load_prompts",
    "untold",
]
