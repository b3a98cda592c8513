"""Which cases of a parametrised test run in the plain tier; the others are slow."""

import pytest


def plain(cases, in_plain):
    """The cases, those that are not `in_plain` marked as slow; a case may be a tuple."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in in_plain else pytest.mark.slow,
        )
        for case in cases
    ]
