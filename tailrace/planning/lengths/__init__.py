"""Predicts how long the responses to a prompt will be, before they begin.

base        what a predictor is
effects     a mean of all, and how far each prompt is from it
history     from the prompt's own past, and from samples of its group that have finished
features    from the prompt: its length, its task, its words (text)
assessment  how good expectations were, and how good they could be

Lengths are compared by their logarithms: responses of 10 and 20 tokens differ as much as those of 1,000 and 2,000.
"""
