"""The transfer queue: a table whose rows are samples and whose columns fill up as tasks do their work.

base         the contract                              local          the queue of one event loop
rows         the state of rows and tasks, without I/O  policies       the choice of ready rows for a claim
cells        the encoding of cells in memory           snapshot       a queue as bytes
controller   the server that knows every row           unit           the server that stores the cells
storage      the memory of a unit                      messages       requests and answers of the processes
client       the queue of another process              processes      starts and watches controller and units
holding      claims that are renewed during work       address        the file by which clients reach a queue
adapters     PyTorch's data loaders, tensors, groups   table_factory  tasks and policies from configuration
"""
