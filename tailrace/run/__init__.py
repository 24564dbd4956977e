"""One training run: what it reads, the parts it is made of, its loop, and what it leaves.

train        a directory, attempts, resuming, the report     directory   the files of a run
checks       what is checked of a recipe, in order           inputs      model and prompts
pipeline     the main loop                                   learner     rows become weights
parts        made alike in both placements                   queue       the table of a run and where its queue is
colocated    all tasks in this process                       separated   tasks in worker processes (workers/)
checkpoint   what a checkpoint holds                         evaluation  answers to prompts that are not trained on
own_loop     engines for a loop of the caller's own          observer    what the queue holds, once a second
recording    samples for people                              step_metrics  the figures of a step
"""
