"""What is true of a store that several daemons share: names, and when it is asked. No I/O, no clock."""
