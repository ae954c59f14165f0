from typing import Any

import pytest
from link_checks import NIXL, nothing_left as nothing_left, warm as warm

from rlhfspec.errors import InvalidRequest, LinkError
from rlhfspec.moves.migration.links.inbox import Landing
from rlhfspec.moves.migration.links.opening import make_landing, open_sending
from rlhfspec.testing.link import LinkContract

pytestmark = pytest.mark.usefixtures("warm", "nothing_left")

KINDS = ["memory", "shm", "tcp", "torch", *NIXL]


class TestLinks(LinkContract):
    @pytest.fixture(params=KINDS, autouse=True)
    def _kind(self, request: pytest.FixtureRequest) -> None:
        self.kind = str(request.param)

    def landing(self, **settings: Any) -> Landing:
        return make_landing(self.kind, **settings)


def test_the_first_way_that_both_share_is_taken() -> None:
    landing = make_landing("auto")
    sending = open_sending(landing.offer)
    assert type(sending).__name__ == "MemorySending"
    sending.close()
    landing.close()


@pytest.mark.parametrize(
    "offer", ["", "[]", "{}", '{"token": 1, "ways": []}', '{"token": "zz", "ways": [{}]}', "[" * 9999]
)
def test_an_offer_that_is_none_is_refused(offer: str) -> None:
    with pytest.raises(LinkError, match="offer: is none of a link"):
        open_sending(offer)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(InvalidRequest, match="did you mean tcp"):
        make_landing("tcpp")
