"""The transfer of data between the processes of a run: samples through the queue, and weights to the engines.

wire               requests and answers over ZeroMQ: sockets, handshake, retries; each request is carried out once
queue              the transfer queue: a table whose rows are samples
weights            weight versions from the trainer to the engines
socket_directory   the directory of local sockets
shared_files       private directories, and files that processes map as memory
"""
