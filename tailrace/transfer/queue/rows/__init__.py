"""The state of every row and task: a state machine without I/O, which every implementation of the queue runs.

control_plane   puts, claims, acks, losses     groups       which groups were put, and which are lost
state           the state as values            slots        row ids that are never used twice
table           tasks and columns              schema       checks of the cells of puts and acks
"""
