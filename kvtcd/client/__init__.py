"""What a program that uses kvtcd imports; loads neither torch nor numba."""
