"""The factors of published KV codecs, one by one, on data of known law and on caches of the user's own."""
