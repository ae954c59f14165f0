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


def test_auto_takes_the_first_link_that_both_ends_share() -> None:
    landing = make_landing("auto")
    sending = open_sending(landing.offer)
    assert type(sending).__name__ == "MemorySending"
    sending.close()
    landing.close()


@pytest.mark.parametrize(
    "offer", ["", "[]", "{}", '{"token": 1, "ways": []}', '{"token": "zz", "ways": [{}]}', "[" * 9999]
)
def test_an_invalid_offer_is_refused(offer: str) -> None:
    with pytest.raises(LinkError, match="offer: is not a link's offer"):
        open_sending(offer)


def test_an_unknown_link_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidRequest, match="did you mean tcp"):
        make_landing("tcpp")
