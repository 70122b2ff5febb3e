"""The scheduler alone: rows are never shared, everybody is served, order is kept."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from speccheck.engine.scheduler import Scheduler


@dataclass(eq=False)
class Fake:
    """A sequence that decodes `n_output` tokens after a prompt of `n_prompt`."""

    name: int
    priority: int
    n_prompt: int
    n_output: int
    n_prefilled: int = 0
    row: int = -1
    order: tuple[int, int] = (0, 0)
    prompt_steps: int = 0


class World:
    """A scheduler and a cache that remembers whose keys each row holds."""

    def __init__(self, n_rows, chunk):
        self.cache = [None] * (n_rows + 1)
        self.scheduler = Scheduler(n_rows, self.move, chunk_tokens=chunk, idle_chunk_tokens=chunk)
        self.alive = []
        self.finished = []
        self.admitted = []

    def move(self, source, target):
        self.cache[target] = self.cache[source]

    def add(self, fake):
        self.scheduler.add(fake)
        self.alive.append(fake)

    def remove(self, fake):
        self.scheduler.remove(fake)
        self.alive.remove(fake)
        self.check()

    def step(self):
        s = self.scheduler
        for fake in s.admit():
            self.cache[fake.row] = fake
            self.admitted.append(fake)
        self.check()
        decoding = s.decoding
        chunks = s.prefill_chunks()
        assert sum(chunk.n_tokens for chunk in chunks) <= s.chunk_tokens
        assert [c.sequence.order for c in chunks] == sorted(c.sequence.order for c in chunks)
        waiting_prompts = [f for f in s.rows if f not in decoding]
        if waiting_prompts:
            assert chunks
            assert chunks[0].sequence.order == min(f.order for f in waiting_prompts)
        for fake in decoding:  # every decoding sequence advances in every step
            fake.n_output -= 1
            if fake.n_output == 0:
                self.remove(fake)
                self.finished.append(fake)
        for chunk in chunks:
            fake = chunk.sequence
            assert chunk.n_tokens > 0
            fake.n_prefilled += chunk.n_tokens
            if fake.n_prefilled == fake.n_prompt:
                s.start_decoding(fake)
                self.check()

    def check(self):
        s = self.scheduler
        assert len(s.rows) <= s.n_rows
        assert [fake.row for fake in s.rows] == list(range(len(s.rows)))
        assert len({id(fake) for fake in s.rows}) == len(s.rows)
        for row, fake in enumerate(s.rows):
            assert self.cache[row] is fake or fake not in self.admitted
            assert (row < s.n_decoding) == (fake.n_prefilled == fake.n_prompt)
        assert len(s.rows) + s.n_waiting == len(self.alive)


arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it arrives
        st.integers(-1, 1),  # priority
        st.integers(1, 12),  # prompt
        st.integers(1, 8),  # output
        st.one_of(st.none(), st.integers(0, 6)),  # cancelled after so many steps
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(arrivals, st.integers(1, 5), st.integers(1, 9))
def test_everybody_finishes_and_rows_are_never_shared(arrivals, n_rows, chunk):
    """Under any arrivals and cancellations each row holds its own keys and all others finish."""
    world = World(n_rows, chunk)
    cancel = {}
    now = 0
    for name, (gap, priority, n_prompt, n_output, cancelled) in enumerate(arrivals):
        for _ in range(gap):
            world.step()
            now += 1
            for fake in [f for f, when in cancel.items() if when == now and f in world.alive]:
                world.remove(fake)
        fake = Fake(name, priority, n_prompt, n_output)
        world.add(fake)
        if cancelled is not None:
            cancel[fake] = now + cancelled
    work = sum(f.n_prompt + f.n_output for f in world.alive)
    for _ in range(work + len(arrivals) + 1):
        world.step()
    assert not world.alive
    never_cancelled = {i for i, arrival in enumerate(arrivals) if arrival[4] is None}
    assert never_cancelled <= {fake.name for fake in world.finished}


@settings(deadline=None)
@given(st.lists(st.integers(-2, 2), min_size=1, max_size=12))
def test_admission_is_by_priority_then_arrival(priorities):
    """With one row the order of admission is a stable sort by priority."""
    world = World(1, 100)
    for name, priority in enumerate(priorities):
        world.add(Fake(name, priority, 3, 2))
    while world.alive:
        world.step()
    admitted = [fake.name for fake in world.admitted]
    assert admitted == sorted(range(len(priorities)), key=lambda i: priorities[i])


def test_a_stream_of_newcomers_does_not_starve_an_old_prompt():
    """An equal-priority prompt is read before those that came later, however rows move."""
    world = World(8, 4)
    old = Fake(0, 0, 40, 1)
    for name in range(1, 4):
        world.add(Fake(name, 0, 1, 30))
    world.add(old)
    for name in range(4, 60):
        world.add(Fake(name, 0, 4, 1))
        world.step()
    assert old in world.finished
