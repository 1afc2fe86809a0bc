import os

import pytest

from ranks import RankPool

RANKS = 3


@pytest.fixture(scope="session")
def rank_pool():
    os.environ["FACE_RANKS"] = str(RANKS)
    pool = RankPool(RANKS)
    yield pool
    pool.close()
