"""The controller of a queue across processes: who may have which row, who is alive, and what survives.

service      the requests that it answers, and how its parts are put together
puts         producers: decides who comes in now, and who waits     admission     rows that are being written
leases       consumers: claims, acks, leases that end               waiting       lines of those who wait, timers
units        the storage units, and what they store                 inline_cells  copies of small cells
journal      every decision, in a file                              replay        from there to where it stood
requests     what requests say of rows                              context       what all of these work on
"""
