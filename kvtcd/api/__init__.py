"""HTTP: the only room with the aiohttp server."""
