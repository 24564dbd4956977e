"""C++ for CPUs, compiled at first use, for work that the interpreter is too slow for."""
