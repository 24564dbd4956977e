"""Clients of a queue across processes.

remote         in an event loop                             sync_queue   without one: the same methods, which block
operations     what a client can do                         one          … with one controller
several        … with several controllers                   shards       which of them has what
states         their states joined to one, and split
put            the steps of a put                           claim        the steps of a claim
ack            the steps of ack, nack and renewal           control      calls that concern the whole queue
writing        writes parts to units                        snapshots    all rows as bytes, and back
session        shared state of one client's operations      checks       argument checks before anything is sent
directory      addresses of controller and units            liveness     whether a silent unit is still there
shared_memory  the memory of units on this host             look         one question to a queue, from outside
"""
