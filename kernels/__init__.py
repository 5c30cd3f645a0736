"""Triton kernels. They import torch and triton only."""
