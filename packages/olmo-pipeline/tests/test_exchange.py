"""The transport's order and lifetimes, with channels that hold a rank to the rules of NCCL."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from olmo_pipeline import interleaved_one_f_one_b, validate
from olmo_pipeline._exchange import Exchange
from olmo_pipeline._message_plan import forward_rows, list_channels, list_messages
from olmo_pipeline._schedule import source_of
from olmo_pipeline._validate import replay


class _Work:
    def __init__(self, wait):
        self.wait = wait


class _FifoChannel:
    """The k-th receive gets the k-th send; a send is free once its receive has ended."""

    def __init__(self):
        self.sent, self.num_posted, self.num_received = [], 0, 0
        self.ending = False

    def send(self, tensor):
        position = len(self.sent)
        self.sent.append(tensor)

        def wait():
            assert self.ending or position < self.num_received, "freed before its arrival"
            tensor.fill_(float("nan"))

        return _Work(wait)

    def receive(self, tensor):
        position = self.num_posted
        self.num_posted += 1

        def wait():
            assert position < len(self.sent), "waits for a message that was never sent"
            tensor.copy_(self.sent[position])
            self.num_received = max(self.num_received, position + 1)

        return _Work(wait)


def _play(rows, rank_of_stage, order):
    """Let every rank perform its actions over FIFO channels; return how many sends it ever kept."""
    num_stages = len(rank_of_stage)
    channels = {pair: _FifoChannel() for pair in list_channels(rank_of_stage)}
    exchanges = [
        Exchange(channels, rows, rank_of_stage, rank=rank, allocate=lambda _: torch.empty(1))
        for rank in range(len(rows))
    ]
    values = {action: float(index) for index, (_, action) in enumerate(order)}
    positions = [0] * len(rows)
    kept = [0] * len(rows)
    for rank, action in order:
        exchange, position = exchanges[rank], positions[rank]
        positions[rank] += 1
        taken = exchange.receive(position)
        source = source_of(action, num_stages)
        if source is None or rank_of_stage[source.stage] == rank:
            assert taken is None
        else:
            assert taken.item() == values[source]
        exchange.send(position, torch.tensor([values[action]]))
        kept[rank] = max(kept[rank], len(exchange._in_flight))
    for channel in channels.values():
        assert channel.num_received == channel.num_posted == len(channel.sent)
        channel.ending = True
    for exchange in exchanges:
        exchange.finish()
    return kept


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_message_arrives_where_it_belongs(any_schedule, data):
    schedule = data.draw(
        st.one_of(
            any_schedule,
            st.builds(interleaved_one_f_one_b, *map(st.integers, (1, 1, 1), (4, 9, 3))),
        )
    )
    _play(schedule.actions, schedule.rank_of_stage, list(replay(schedule)))


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_messages_without_backward(any_schedule, data):
    schedule = data.draw(any_schedule)
    rows = forward_rows(schedule.rank_of_stage, schedule.num_ranks, range(3))
    order = [
        (rank, action)
        for stage, rank in enumerate(schedule.rank_of_stage)
        for action in rows[rank]
        if action.stage == stage
    ]
    _play(rows, schedule.rank_of_stage, order)


def test_sends_are_freed_on_the_way():
    # Without that a rank would keep every gradient that it has sent, 64 and more.
    for num_chunks in (1, 2):
        schedule = interleaved_one_f_one_b(4, 64, num_chunks)
        validate(schedule)
        kept = _play(schedule.actions, schedule.rank_of_stage, list(replay(schedule)))
        assert max(kept) <= 5 * num_chunks * 4


def test_messages_of_a_v(parse_rows):
    schedule = parse_rows((0, 1, 1, 0), 1, "F0.0 F3.0 B3.0 B0.0", "F1.0 F2.0 B2.0 B1.0")
    messages = list_messages(schedule.actions, schedule.rank_of_stage)
    assert [(m.source, m.destination, m.sent_at, m.used_at) for m in messages] == [
        (0, 1, 0, 0),
        (0, 1, 2, 2),
        (1, 0, 1, 1),
        (1, 0, 3, 3),
    ]
    assert list_channels(schedule.rank_of_stage) == [(0, 1), (1, 0)]
