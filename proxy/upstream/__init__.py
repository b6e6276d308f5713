"""HTTP out: aiohttp, bytes in, bytes out."""
