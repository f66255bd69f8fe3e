"""Who works on what: every piece is done once, whoever is lost, comes back, or says the same thing twice."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from toolroll.rollout.dispatch import AHEAD, LEASE, Dispatch, Piece, Tenure


def pieces(count: int) -> list[Piece[int]]:
    return [Piece(number, number) for number in range(count)]


def dispatch(count: int, *, workers: int = 1, joined: str = "a") -> Dispatch[int]:
    made = Dispatch(iter(pieces(count)), workers=workers)
    for name in joined:
        made.join(name, 0.0)
    return made


def test_in_the_order_of_the_source_and_what_was_lost_first() -> None:
    work = dispatch(10, workers=2, joined="ab")
    assert [piece.key for piece in work.take("a", 3, 1.0)] == [0, 1, 2]
    assert [piece.key for piece in work.take("b", 1, 9.0)] == [3]
    (lost,) = work.lose(1.0 + LEASE + 0.1)
    assert (lost.worker, [piece.key for piece in lost.pieces]) == ("a", [0, 1, 2])
    assert [piece.key for piece in work.take("b", 1, 12.0)] == [4], "nobody knows yet what a had done"
    work.settle("a", done=[1])
    assert [piece.key for piece in work.take("b", 2, 12.0)] == [0, 2]


def test_what_comes_from_a_worker_that_was_lost_is_refused() -> None:
    work = dispatch(1, joined="ab")
    work.take("a", 1, 0.0)
    work.heard("b", LEASE)
    work.lose(LEASE + 1)
    assert not work.heard("a", LEASE + 1)
    assert not work.done("a", 0)
    work.settle("a", done=[])
    assert [piece.key for piece in work.take("b", 5, LEASE + 1)] == [0]
    assert not work.is_over
    assert work.done("b", 0)
    assert work.is_over


def test_at_the_end_nobody_takes_more_than_its_share() -> None:
    work = dispatch(128, workers=2, joined="a")
    assert len(work.take("a", 1000, 0.0)) == 64, "the other one is still to come"
    assert len(work.take("a", 1000, 0.0)) == 0
    work.join("b", 0.0)
    assert len(work.take("b", 1000, 0.0)) == 64


def test_one_that_never_comes_keeps_nothing_back_for_ever() -> None:
    work, done = dispatch(100, workers=4), 0
    while not work.is_over:
        taken = work.take("a", 10, 0.0)
        assert taken
        done += sum(work.done("a", piece.key) for piece in taken)
    assert done == 100


def test_no_more_is_read_than_is_needed() -> None:
    read = Counter[str]()

    def endless() -> object:
        while True:
            read["pieces"] += 1
            yield Piece(read["pieces"], 0)

    work = Dispatch(endless(), workers=1000)  # type: ignore[arg-type]
    work.join("a", 0.0)
    assert len(work.take("a", 1024, 0.0)) == 1024
    assert read["pieces"] <= AHEAD + 1024


def test_a_worker_stops_before_it_is_given_up() -> None:
    tenure = Tenure(0.0)
    assert tenure.holds(LEASE * 0.89)
    assert not tenure.holds(LEASE * 0.91)
    tenure.renewed(LEASE * 0.5)
    assert tenure.holds(LEASE * 1.3)
    tenure.renewed(LEASE * 0.4)
    assert tenure.holds(LEASE * 1.3), "an answer that was overtaken takes nothing back"


class Cluster(RuleBasedStateMachine):
    """Workers that join, work, fall silent, die over a commit, come back and say things late."""

    COUNT = 6

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.work = Dispatch(iter(pieces(self.COUNT)), workers=2)
        self.names = 0
        self.alive: dict[str, tuple[set[int], Tenure]] = {}
        self.committed: Counter[int] = Counter()
        """What stands on disk, by whom it was written."""
        self.by: dict[str, set[int]] = {}
        self.counted: Counter[int] = Counter()

    def _someone(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.alive)))

    @rule()
    @precondition(lambda self: len(self.alive) < 4)
    def join(self) -> None:
        name = f"w{self.names}"
        self.names += 1
        self.work.join(name, self.now)
        self.alive[name], self.by[name] = (set(), Tenure(self.now)), set()

    @rule(data=st.data(), most=st.integers(0, 8), lost_on_the_way=st.booleans())
    @precondition(lambda self: self.alive)
    def ask(self, data: st.DataObject, most: int, lost_on_the_way: bool) -> None:
        name = self._someone(data)
        holds, tenure = self.alive[name]
        if not self.work.heard(name, self.now):
            del self.alive[name]
            return
        if not lost_on_the_way:
            holds.update(int(str(piece.key)) for piece in self.work.take(name, most, self.now))
            tenure.renewed(self.now)

    @rule(data=st.data(), says_so=st.booleans())
    @precondition(lambda self: any(holds for holds, _ in self.alive.values()))
    def commit(self, data: st.DataObject, says_so: bool) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, (holds, _) in self.alive.items() if holds)))
        holds, tenure = self.alive[name]
        key = data.draw(st.sampled_from(sorted(holds)))
        if tenure.holds(self.now):
            holds.discard(key)
            self.committed[key] += 1
            self.by[name].add(key)
            if says_so:
                self.counted[key] += self.work.done(name, key)
            else:
                del self.alive[name]  # it dies before it can say so

    @rule(data=st.data())
    @precondition(lambda self: self.alive)
    def die(self, data: st.DataObject) -> None:
        del self.alive[self._someone(data)]

    @rule(seconds=st.sampled_from([0.1, 0.3 * LEASE, 0.95 * LEASE]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.look()

    def look(self) -> None:
        for lost in self.work.lose(self.now):
            had = {int(str(piece.key)) for piece in lost.pieces}
            written = self.by[lost.worker] & had
            for key in written:
                self.counted[key] += 1
            self.work.settle(lost.worker, written)

    @invariant()
    def nothing_is_done_twice(self) -> None:
        assert all(count == 1 for count in self.committed.values())
        assert all(count <= 1 for count in self.counted.values())

    def teardown(self) -> None:
        """However it went, someone who stays gets through with all of it."""
        self.alive.clear()
        self.work.join("last", self.now)
        for _ in range(200):
            self.now += 1.0
            self.look()
            for piece in self.work.take("last", 5, self.now):
                self.committed[int(str(piece.key))] += 1
                self.counted[int(str(piece.key))] += self.work.done("last", piece.key)
            if self.work.is_over:
                break
        assert self.work.is_over
        assert self.committed == self.counted == Counter(range(self.COUNT))


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
