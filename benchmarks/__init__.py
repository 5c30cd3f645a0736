"""Benchmarks of gsync, side by side with what PyTorch brings."""
