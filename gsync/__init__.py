"""Gradient synchronisation for data-parallel training: gradients in, their mean over all ranks out."""

__version__ = "0.1.0"
