"""The package's pages on the web, below the address of the source that a build gets in ``SOURCE_URL``.

A checkout does not know whose it is, and a fork's release names the fork. A wheel that is built from a source archive
has the archive's URLs: hatchling reads them there and does not ask this hook.
"""

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Urls(MetadataHookInterface):
    """Fills ``project.urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``urls`` in *metadata*: those below ``SOURCE_URL``, or none."""
        metadata["urls"] = {}
        source = os.environ.get("SOURCE_URL")
        if source:
            tag = f"v{metadata['version']}"
            metadata["urls"] = {
                "Source": source,
                "Issues": f"{source}/issues",
                "Documentation": f"{source}/tree/{tag}/docs",
                "Changelog": f"{source}/blob/{tag}/CHANGELOG.md",
            }
