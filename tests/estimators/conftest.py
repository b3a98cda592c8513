"""Every estimator test runs with the sum of a CPU and with that of an accelerator."""

import pytest

from jaxroll.estimators import bootstrap


@pytest.fixture(params=["cpu", "accelerator"], autouse=True, scope="module")
def form(request):
    """Which form of `discounted_cumsum` is compiled for this machine."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "accelerator":
            patch.setattr(bootstrap, "cumsum_in_place", bootstrap.associative_cumsum)
        yield request.param
