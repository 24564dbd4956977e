"""What a trace looks like, in figures (PolyTrace, section 3).

distribution   one column: percentiles, tail, spread
prompts        how far the samples of a prompt are alike, and what that tells of the longest
steps          how a step drains when its samples begin together
description    all figures of a trace
"""
