"""Hides gigatoken from a proxy that is started with this folder on its path, as if ``ullage[fast]`` were not installed.

Loading it takes a second of CPU, which hundreds of proxies that live for two seconds would spend for nothing.
"""

import sys

sys.modules["gigatoken"] = None  # type: ignore[assignment]
