"""Distributions of one amount, such as the tokens of a response.

base          what a distribution is
lognormal     the logarithm is normal
gamma         the gamma distribution
mixture       the logarithm is a mixture of normal distributions
pareto_tail   another distribution, with a Pareto tail above a threshold
quantiles     lines between given quantiles, for amounts that no formula describes
shares        whole numbers from 1 on, each with its share
factory       the union of all, and their fits by name
"""
