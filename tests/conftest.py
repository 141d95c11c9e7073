"""What all tests share."""

import os

import torch

pytest_plugins = ["tests.data.fixtures"]

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers are the parallelism
