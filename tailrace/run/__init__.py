"""One training run: what it reads, the parts it is made of, its loop, and what it leaves.

train        a directory, attempts, resuming, the report     directory   the files of a run
inputs       model and prompts                               queue       the table of a run and where its queue is
pipeline     the main loop                                   learner     rows become weights; checkpoints
evaluation   answers to prompts that are not trained on      parts       made alike in both placements
colocated    all tasks in this process                       separated   tasks in worker processes (workers/)
own_loop     the workers of a run, for a loop of the caller's own
"""
