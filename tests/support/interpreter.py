"""Triton's interpreter, which runs kernels on a CPU. It has to be asked for before the first one is made."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
