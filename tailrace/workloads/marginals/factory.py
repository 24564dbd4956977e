"""All distributions: the union that files hold, and the fits by the names of their families."""

from collections.abc import Callable, Iterator, Mapping

from tailrace.workloads.marginals.base import Array, FitError
from tailrace.workloads.marginals.gamma import Gamma
from tailrace.workloads.marginals.lognormal import Lognormal
from tailrace.workloads.marginals.mixture import Mixture
from tailrace.workloads.marginals.pareto_tail import Body, ParetoTail
from tailrace.workloads.marginals.quantiles import Quantiles
from tailrace.workloads.marginals.shares import Shares

Formula = Body | ParetoTail
"""The distributions of a few parameters, whose number is `degrees`."""
AnyMarginal = Formula | Quantiles | Shares

_COMPONENTS = (2, 3, 4)
_TAILS = (0.1, 0.05, 0.02)


def _mixtures(values: Array) -> Iterator[Body]:
    """Yield a fit for each number of components that converges."""
    errors = []
    for components in _COMPONENTS:
        try:
            yield Mixture.fit(values, components)
        except FitError as error:
            errors.append(error)
    if len(errors) == len(_COMPONENTS):
        raise errors[0]


def _gamma(values: Array) -> Iterator[Body]:
    yield Gamma.fit(values)


def _lognormal(values: Array) -> Iterator[Body]:
    yield Lognormal.fit(values)


FAMILIES: Mapping[str, Callable[[Array], Iterator[Body]]] = {
    "lognormal": _lognormal,
    "gamma": _gamma,
    "mixture": _mixtures,
}
"""The fits of each family to [n] positive values that are not all equal. They raise a FitError where none converges."""


def with_tails(values: Array, body: Body) -> Iterator[Formula]:
    """Yield `body`, and `body` with Pareto tails of several shares."""
    yield body
    for share in _TAILS:
        try:
            yield ParetoTail.fit(values, body, share)
        except FitError:
            continue
