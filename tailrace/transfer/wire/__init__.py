"""Requests and answers between processes, over ZeroMQ. A `Protocol` names the messages of one kind of server.

server       a loop that answers                   connection   a client's side: retries and limits
client       the base of both clients              aio, sync    clients for an event loop, and for blocking calls
handshake    both sides know the token             answers      a repeated request counts once
frames       a message as bytes                    sockets      endpoints and listeners
porter       lets connections in                   messages     the messages of the wire itself
protocol     the messages of one kind of server    peers        a client's knowledge of its servers
"""
