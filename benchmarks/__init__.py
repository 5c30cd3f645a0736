"""Benchmarks of gsync, side by side with what PyTorch brings.

`python -m gsync.benchmarks.ddp` (or `gsync bench`) trains one model under every rival and prints one table;
`python -m gsync.benchmarks.kernels` (or `gsync bench kernels`) times the operations alone. How to read them: docs/tuning.md.
"""
