"""The package's pages on the web, below the address of the source that a build gets in ``SOURCE_URL``.

A checkout does not know whose it is, and a fork's release names the fork. A wheel that is built from a source archive
has the archive's URLs: hatchling reads them there and does not ask this hook. An index shows the README without the
files beside it, so its links to them become addresses, too.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(\]\()(?![a-z]+:|#)")
"""The beginning of a Markdown link to a file beside the README."""

PICTURE = re.compile(r'((?:src|srcset)=")(?![a-z]+:)')
"""The beginning of a picture's file."""


class Urls(MetadataHookInterface):
    """Fills ``project.urls`` and ``project.readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``urls`` in *metadata*, those below ``SOURCE_URL`` or none, and ``readme`` with links to the same."""
        text = Path(self.root, "README.md").read_text("utf-8")
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
            text = LINK.sub(rf"\g<1>{source}/blob/{tag}/", text)
            text = PICTURE.sub(rf"\g<1>{source}/raw/{tag}/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
