"""Stores that several daemons share, each behind the client library that maintains the protocol.

An answer of a store that speaks of many names has one entry for each, in their order; where one of them could
not be asked, while others could, its entry is the error. A store that could not be asked at all raises.
"""
