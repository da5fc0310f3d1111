"""``python -m kvtcd``."""

from kvtcd.cli import main

main()
