"""C++ for CPUs, compiled at first use: what the interpreter is too slow for."""
