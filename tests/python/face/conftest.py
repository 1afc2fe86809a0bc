import pytest

from ranks import RankPool

RANKS = 3


@pytest.fixture(scope="session")
def rank_pool():
    pool = RankPool(RANKS)
    yield pool
    pool.close()
