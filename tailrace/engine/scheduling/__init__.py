"""Which tokens to compute next: plain numbers, no tensors.

step        a step as a list of chunks      scheduler   what a step computes, and who gives way without blocks
sequence    one response under way          blocks      the cache's blocks and who shares them
stopping    when a response ends            dispatch    which replica gets a request
transplant  sequences on their way to other replicas, and (migration) the blocks that move along
"""
