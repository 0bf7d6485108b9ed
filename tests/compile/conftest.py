"""Every test of this tier has a cache of its own."""

import pytest


@pytest.fixture(autouse=True)
def _fresh_service(fresh_service):
    """Nothing is shared with the test before."""
