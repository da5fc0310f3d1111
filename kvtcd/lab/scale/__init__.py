"""When several hosts share one store of packed blocks: what it saves, and from which length on."""
