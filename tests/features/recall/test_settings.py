"""The settings of the recall tool."""

from proxy.features.recall.settings import Recall, recall_settings, summary_lines
from proxy.features.settings import AllSettings
from proxy.settings import Settings


def test_the_tool_is_announced_where_it_edits_answers():
    """It is off by default; the start-up summary names it if it is on and requests are compacted."""
    assert recall_settings(Settings()) == recall_settings(AllSettings()) == Recall(enabled=False)
    on = {"recall": {"enabled": True, "results": 5}}
    settings = AllSettings.model_validate({"compression": on})
    assert recall_settings(settings) == Recall(enabled=True, results=5)
    assert [title for title, _ in summary_lines(settings)] == ["recall"]
    assert summary_lines(AllSettings.model_validate({"compression": {**on, "mode": "observe"}})) == []
