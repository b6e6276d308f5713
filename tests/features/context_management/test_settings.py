"""The setting that says who applies context edits."""

from proxy.features.context_management.settings import edited_upstreams
from proxy.features.settings import AllSettings
from proxy.settings import Settings


def test_only_the_upstreams_that_leave_it_to_ullage_are_edited():
    """By default the edits go on to the upstream."""
    assert edited_upstreams(Settings()) == []
    upstreams = [
        {"name": "able", "base_url": "http://a"},
        {"name": "own", "base_url": "http://a", "context_management": "own"},
        {"name": "pass", "base_url": "http://a", "context_management": "pass"},
    ]
    assert edited_upstreams(AllSettings.model_validate({"upstreams": upstreams})) == ["own"]
