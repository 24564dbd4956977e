"""The transfer queue: a table whose rows are samples and whose columns fill up as tasks do their work.

base         the contract                              local        the queue of one event loop
rows         who may have which row, without I/O       policies     which ready rows a claim gets
cells        how cells lie in memory                   snapshot     a queue on disk
controller   the server that knows every row           unit         the server that has the cells
storage      where a unit keeps them                   messages     what clients, controller and units say
client       the queue of another process              processes    starts and watches controller and units
holding      a claim that is renewed while work lasts  address      how to reach a queue
adapters     PyTorch's data loaders, tensors, groups
"""
