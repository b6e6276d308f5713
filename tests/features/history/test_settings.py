"""The section of the archive."""

from proxy.features.history.settings import Archive, archive_settings, summary_lines
from proxy.features.settings import AllSettings
from proxy.settings import Settings


def test_the_archive_is_announced_with_its_days():
    """It is off by default; the start-up summary says for how long originals stay."""
    assert archive_settings(Settings()) == archive_settings(AllSettings()) == Archive(enabled=False)
    settings = AllSettings.model_validate({"archive": {"enabled": True, "days": 2.5, "max_item": "1KiB"}})
    assert archive_settings(settings).max_item == 1024
    assert summary_lines(settings) == [("archive", "originals of what leaves a view, sealed, for 2.5 days")]
