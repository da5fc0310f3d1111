"""What an operator asks without a request of a client: of a daemon that runs, or of what one left on disk."""
