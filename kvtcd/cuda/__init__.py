"""Memory of a GPU that two processes share: CUDA's driver API, and what either side does with it."""
