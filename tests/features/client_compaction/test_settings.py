"""The settings that say who answers a compaction that a client makes itself."""

import pytest

from proxy.features.client_compaction.settings import UpstreamWithCompaction, answers_from_summaries
from proxy.features.settings import AllSettings
from proxy.settings import Settings


def test_a_clients_compaction_goes_to_its_model_by_default():
    """Answers from summaries are for those who ask for them."""
    assert not answers_from_summaries(Settings())
    assert not answers_from_summaries(AllSettings())
    assert answers_from_summaries(AllSettings.model_validate({"compression": {"client_compaction": "answer"}}))


@pytest.mark.parametrize(
    ("url", "compacts"),
    [
        ("https://api.openai.com/v1", True),
        ("https://chatgpt.com/backend-api/codex", True),
        ("https://mine.openai.azure.com/openai/v1", True),
        ("https://api.openai.com.example.org/v1", False),
        ("http://127.0.0.1:8000/v1", False),
    ],
)
def test_few_servers_are_known_to_compact(url, compacts):
    """OpenAI's and Azure's own do; of all others it is tried."""
    assert UpstreamWithCompaction(name="a", base_url=url).compacts is compacts
