"""The transfer queue of one event loop, for colocated runs and tests.

queue   the queue itself     data_plane   the cells of its rows     lines   waiting callers
"""
