"""Optimizer state in host memory: which parameters are updated together, and what an update leaves."""

import torch

from autopar.runtime.state.host_visits import turns, visit_all


def shards(*sizes: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, requires_grad=True) for size in sizes]


def set_gradients(members: list[torch.Tensor]) -> None:
    for member in members:
        member.grad = torch.sin(member.detach())


def test_a_turn_has_at_most_the_bytes_of_the_largest_and_one_group() -> None:
    members = [(0, 8), (0, 3), (0, 5), (0, 1), (1, 2), (1, 4), (1, 2), (0, 1)]
    expected = [(0, [8]), (0, [3, 5]), (0, [1]), (1, [2]), (1, [4]), (1, [2]), (0, [1])]
    assert turns(members, lambda size: 64 * size) == expected


def test_small_members_count_with_what_aligning_them_takes() -> None:
    assert turns([(0, 128), (0, 1), (0, 1), (0, 1)], lambda size: size) == [(0, [128]), (0, [1, 1]), (0, [1])]


def test_no_members_have_no_turns() -> None:
    assert turns([], len) == []


def test_a_visit_updates_as_torch_does_and_leaves_the_state_where_it_was() -> None:
    ours, theirs = shards(5, 3), shards(5, 3)
    optimizer, expected = torch.optim.Adam(ours, lr=0.1), torch.optim.Adam(theirs, lr=0.1)
    places = []
    for _ in range(3):
        for members in (ours, theirs):
            set_gradients(members)
        visit_all([(optimizer, ours)])
        expected.step()
        places.append([optimizer.state[shard]["exp_avg"].data_ptr() for shard in ours])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert places[0] == places[1] == places[2]


def test_a_shard_without_a_gradient_keeps_its_state() -> None:
    used, unused = members = shards(5, 3)
    optimizer = torch.optim.Adam(members, lr=0.1)
    set_gradients(members)
    visit_all([(optimizer, members)])
    before, weight = {key: value.clone() for key, value in optimizer.state[unused].items()}, unused.detach().clone()
    unused.grad = None
    visit_all([(optimizer, members)])
    assert optimizer.state[used]["step"] == 2
    assert all(torch.equal(before[key], value) for key, value in optimizer.state[unused].items())
    assert torch.equal(unused, weight)
