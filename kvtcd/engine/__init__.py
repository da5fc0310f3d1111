"""Who does what when: asyncio and threads around the catalog, without HTTP."""
