import pytest

from ranks import RankPool

RANKS = 4


@pytest.fixture(scope="session")
def rank_pool():
    pool = RankPool(RANKS)
    yield pool
    pool.close()
