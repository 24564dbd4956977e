"""How the processes of a transfer queue talk: messages, sockets, retries."""
