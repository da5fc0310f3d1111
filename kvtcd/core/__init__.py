"""What is true: pure Python without I/O, event loop or tensor."""
