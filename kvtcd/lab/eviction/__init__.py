"""Rivals that drop tokens instead of packing them, H2O and TOVA, run by kvpress in an environment of its own.

A store sees no queries, so these are no codecs. `command` measures them on the documents on which `eval rd`
measured codecs; `worker` is what runs beside kvpress, and imports nothing of this program.
"""
