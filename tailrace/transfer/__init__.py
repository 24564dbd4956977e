"""What moves data between the processes of a run: samples through the queue, weights to the engines.

wire               requests and answers over ZeroMQ: sockets, handshake, retries, each carried out once
queue              the transfer queue: a table whose rows are samples
weights            weight versions from the trainer to the engines
socket_directory   where local sockets lie
shared_files       private directories, and files that processes map as memory
"""
