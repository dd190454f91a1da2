"""C kernels for training on CPU; see build.py for how they come to be, calls.py for their use."""
