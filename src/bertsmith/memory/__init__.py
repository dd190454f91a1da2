"""The planner: what a run will need of a device's memory and time, said before either is spent.

Pure arithmetic on the run's settings; imports neither torch nor numpy. The formulas follow the code
of `model`, `train` and `checkpoint` step by step, and benchmarks/memory_grid.py holds them to what
torch's allocator really gave out.
"""
