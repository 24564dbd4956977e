"""The controller of a queue across processes: it hands out rows, watches its peers and keeps the journal.

service      the requests that it answers, and how its parts are put together
puts         producers: which put is admitted now, and which waits   admission     rows that are being written
leases       consumers: claims, acks, leases that end                waiting       lines of waiting requests, timers
units        the storage units, and what they store                  inline_cells  copies of small cells
journal      every decision, in a file                               replay        the state that a journal leads to
requests     the rows and cells that requests name                   context       the state that the parts share
"""
