"""Crashes on purpose: children that are killed, disks that lose or tear writes, and what must hold then."""
