"""The code of one training run: its inputs, its parts, its main loop and its files.

train        a directory, attempts, resuming, the report     directory   the files of a run
checks       the checks of a recipe, in order                inputs      model and prompts
pipeline     the main loop                                   learner     rows become weights
parts        made alike in both placements                   queue       the run's table and its queue
colocated    all tasks in this process                       separated   tasks in worker processes (workers/)
checkpoint   the contents of a checkpoint                    evaluation  answers to prompts that are not trained on
resume       where a run goes on, also after a death         observer    the queue's counts, once a second
own_loop     engines for a loop of the caller's own, with    loop_runtime, its processes, and loop_diary, its events
keep_best    the figures that say which checkpoint is the best
signal_check, learning_watch                                 warnings about what a run learns
log          the first and the last event of a run
recording    samples for people                              step_metrics  the figures of a step
"""
