"""The choice of the tokens to compute next: plain numbers, no tensors.

step        a step as a list of chunks      scheduler   the chunks of a step, and preemption
sequence    one response under way          blocks      the cache's blocks and their holders
waiting     sequences that have not begun   prefixes    cached blocks that others can use
stopping    the end of a response           dispatch    the replica of a request
transplant  sequences on their way to other replicas, and (migration) the blocks that move along
"""
