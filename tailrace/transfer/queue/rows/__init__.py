"""The state of every row and task, as a machine without I/O: every implementation of the queue runs it.

control_plane   puts, claims, acks, losses     groups       which groups were put, and which are lost
state           what is saved of it            slots        row ids that are never used twice
table           tasks and columns              schema       what a put or an ack may hold
"""
