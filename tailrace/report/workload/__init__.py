"""The charts of workloads: of traces side by side, and of a run's own trace.

base         the traces of a page, and what their charts share
lengths      how long prompts and responses are
variety      the tail of the responses, and how they go with prompts and rewards
prompts      how far the responses to a prompt are alike
steps        how the figures move over the steps
turns        turns and tools
scheduling   what a scheduler that knows the lengths can gain
sections     all of these, in the order in which they are read
page         one HTML page of them
run          those of a run, for its report
"""
