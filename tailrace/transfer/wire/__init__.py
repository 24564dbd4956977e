"""Requests and answers between processes, over ZeroMQ; which ones, a `Protocol` says.

server       a loop that answers                   connection   a client's side: retries and limits
client       what both clients share               aio, sync    operations in an event loop, or that block
handshake    both sides know the token             answers      a request that is repeated counts once
frames       a message as bytes                    sockets      endpoints and listeners
porter       lets connections in                   messages     those of the wire itself
protocol     those of a kind of server             peers        what a client knows about servers
"""
