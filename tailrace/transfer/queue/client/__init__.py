"""Clients of a queue across processes.

remote         in an event loop                             sync_queue   without one: the same methods, which block
put            how a put goes                               claim        how a claim goes
ack            how an ack, a nack and a renewal go          control      calls that concern the whole queue
writing        how parts get to units                       snapshots    all rows as bytes, and back
session        what the operations of one client share      checks       what is refused before anything is sent
directory      where controller and units are               liveness     whether a silent unit is still there
shared_memory  the memory of units on this host             look         one question to a queue, from outside
"""
