"""What a trace looks like, in figures (PolyTrace, section 3).

distribution   one column: percentiles, tail, spread
histogram      one column or two of them, in bins that all traces share
correlation    two columns
prompts        how far the samples of a prompt are alike, and what that tells of the longest
steps          the figures of one step, how it drains, and how far steps differ
trend          how an amount drifts over the steps, and where its level changes
turns, tools   conversations
description    all figures of a trace
"""
