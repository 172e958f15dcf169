"""Neighbours and label views: worked by hand, invariant, cut without a second search."""

import numpy as np
import pytest
import torch

from attnknn.core.bank import MemoryBank
from attnknn.core.neighbours import LabelView, nearest_copies
from tests.conftest import unit


def test_a_label_view_by_hand(circle):
    # Leave-one-out neighbours: 0 -> 1, 2; 1 -> 2, 0; 2 -> 1 and 0 or 3 (a tie); 3 -> 2, 1.
    view = circle.view_of(torch.tensor([0, 1, 1, 1]))
    assert view.histograms[0].tolist() == [0, 1, 0, 0]
    assert view.histograms[1].tolist() == [0.5, 0.5, 0, 0]
    assert view.histograms[3].tolist() == [0, 1, 0, 0]
    assert view.trust[[0, 1, 3]].tolist() == [0, 0.5, 1]
    assert view.n_classes == 4
    assert view.mean_trust == pytest.approx(view.trust.mean().item())


def test_prototypes_are_means_of_trusted_rows():
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.6, 0.8]])
    labels = torch.tensor([0, 0, 0, 1])
    # Row 2 sees only the label 1, so it is not trusted; row 3 is its class's only row.
    ids = torch.tensor([[1, 2], [0, 2], [3, 3], [0, 1]])
    view = LabelView(rows, labels, lambda: ids, n_classes=3)
    half = 0.5**0.5
    expected = torch.tensor([[half, half], [0.6, 0.8], [0.0, 0.0]])
    torch.testing.assert_close(view.prototypes, expected)


def test_exactly_half_is_not_trusted():
    # Ten times 1/20 in float32 is above one half; the share must be exact.
    n_rows, voters = 23, 20
    rows = torch.nn.functional.normalize(torch.arange(2 * n_rows).float().view(-1, 2) + 1, dim=1)
    labels = torch.tensor([0] * 12 + [1] * 11)
    ids = torch.cat([torch.arange(10), torch.arange(12, 22)]).expand(n_rows, voters)
    view = LabelView(rows, labels, lambda: ids, n_classes=2)
    assert view.trust.tolist() == [0.5] * n_rows
    # Nobody is trusted, so all rows of a class shape its prototype.
    expected = torch.nn.functional.normalize(rows[:12].sum(dim=0), dim=0)
    torch.testing.assert_close(view.prototypes[0], expected)


def test_an_absent_class_has_no_prototype_and_no_share(bank, blobs):
    view = LabelView(bank.rows, bank.labels, lambda: bank.own_neighbours, n_classes=7)
    assert view.prototypes[5:].abs().max() == 0
    assert view.histograms[:, 5:].max() == 0
    torch.testing.assert_close(view.histograms.sum(dim=1), torch.ones(len(blobs.rows)))


def test_renaming_the_labels_renames_the_view(bank):
    order = torch.tensor([3, 0, 4, 1, 2])  # class c becomes order[c]
    renamed = bank.view_of(order[bank.labels])
    torch.testing.assert_close(renamed.histograms[:, order], bank.view.histograms)
    torch.testing.assert_close(renamed.prototypes[order], bank.view.prototypes)
    assert torch.equal(renamed.trust, bank.view.trust)


def test_what_belongs_to_a_neighbour_is_read_from_its_row(neighbours, blobs):
    row, place = 17, 3
    found = int(neighbours.ids[row, place])
    view = neighbours.view
    assert neighbours.labels[row, place] == blobs.labels[found]
    assert neighbours.trust[row, place] == view.trust[found]
    assert torch.equal(neighbours.histograms[row, place], view.histograms[found])
    np.testing.assert_array_equal(neighbours.keys[row, place], blobs.rows[found])


@pytest.mark.parametrize("k", [1, 5, 11])
def test_the_first_k_of_a_search_are_the_search_at_k(bank, blobs, neighbours, k):
    fresh, cut = bank.search(blobs.queries, k), neighbours.nearest(k)
    assert torch.equal(cut.ids, fresh.ids)
    torch.testing.assert_close(cut.scores, fresh.scores)
    assert cut.k == k and cut.labels.shape == (29, k)


def test_some_queries_are_the_search_for_these_queries(bank, blobs, neighbours):
    some = neighbours.of_queries(torch.tensor([4, 2]))
    fresh = bank.search(blobs.queries[[4, 2]], 11)
    assert torch.equal(some.ids, fresh.ids)
    assert torch.equal(some.queries, fresh.queries)
    assert torch.equal(neighbours.of_queries(slice(0, 3)).ids, neighbours.ids[:3])
    _ = neighbours.labels, neighbours.trust, neighbours.histograms, neighbours.prototype_cosines
    again = neighbours.of_queries(torch.tensor([4, 2]))  # now shares of what is there for all
    for name in ("labels", "trust", "histograms", "prototype_cosines"):
        assert name in again.made
        torch.testing.assert_close(getattr(again, name), getattr(fresh, name))


def test_cutting_forgets_what_was_computed_for_all(neighbours):
    assert neighbours.labels.shape == (29, 11)
    assert neighbours.nearest(5).of_queries(slice(0, 3)).labels.shape == (3, 5)


@pytest.mark.parametrize(
    ("k", "message"),
    [
        (12, "k must be at most the 11 neighbours searched, got k=12"),
        (0, "k must be an integer of at least 1, got k=0"),
    ],
)
def test_a_k_that_was_not_searched_is_refused(neighbours, k, message):
    with pytest.raises(ValueError, match=message):
        neighbours.nearest(k)


def test_other_labels_change_the_view_and_nothing_else(bank, neighbours):
    other = neighbours.with_view(bank.view_of((bank.labels + 1) % 5))
    assert torch.equal(other.ids, neighbours.ids)
    assert torch.equal(other.labels, (neighbours.labels + 1) % 5)


def test_everything_moves_to_the_device(neighbours):
    moved = neighbours.to("meta")
    tensors = (moved.queries, moved.scores, moved.ids, moved.view.rows)
    view = moved.view
    for tensor in (*tensors, view.labels, view.histograms, view.trust, view.prototypes):
        assert tensor.device.type == "meta"
    assert moved.labels.shape == (29, 11) and view.mean_trust == neighbours.view.mean_trust


def test_plain_votes_never_search_for_the_rows_own_neighbours(bank, blobs):
    found = bank.search(blobs.queries, 3)
    assert found.labels.shape == (29, 3)
    assert "own_neighbours" not in vars(bank.content.bank)
    assert found.trust.shape == (29, 3)
    assert "own_neighbours" in vars(bank.content.bank)


def test_an_absent_class_gets_no_prototype_posterior():
    rows = torch.eye(3)
    view = LabelView(
        rows, torch.tensor([0, 0, 2]), lambda: torch.tensor([[1], [0], [0]]), n_classes=4
    )
    # Without the mask a zero prototype (cosine 0) would beat every class on the far side.
    posterior = view.prototype_posterior(-rows[:1], 5.0)
    assert posterior[0, [1, 3]].tolist() == [0.0, 0.0]
    assert posterior.sum() == pytest.approx(1.0)


@pytest.fixture
def random_labels(make_blobs):
    """A bank whose labels say nothing: any accuracy above chance is the query's own label."""
    blobs = make_blobs(3, n_rows=499)
    labels = np.random.default_rng(4).integers(5, size=499)
    bank = MemoryBank(blobs.rows, labels, n_classes=5)
    return bank, bank.search(blobs.rows, 11, exclude_ids=np.arange(499))


def test_fault_1_a_rows_label_does_not_come_back_through_its_neighbours(random_labels):
    bank, found = random_labels
    for votes in (found.histograms.mean(dim=1), found.prototype_posterior(found.queries, 5.0)):
        accuracy = (votes.argmax(dim=1) == bank.labels).float().mean()
        assert accuracy < 0.2 + 3 * (0.2 * 0.8 / 499) ** 0.5
    leaking = bank.view.histograms[found.ids].mean(dim=1).argmax(dim=1) == bank.labels
    assert leaking.float().mean() > 0.35  # what would come back without the guard


def test_histograms_without_the_query_by_hand():
    rows = unit(np.array([[1, 0], [1, 0.1], [1, 0.2], [1, 0.3]]))
    bank = MemoryBank(rows, np.array([0, 1, 1, 0]), n_classes=2, trust_neighbours=2)
    found = bank.search(rows[:1], 2, exclude_ids=np.array([0]))
    assert found.ids.tolist() == [[1, 2]]
    # Row 1 has neighbours 0 and 2; without the query, row 0, only 2 is left.
    assert found.histograms[0, 0].tolist() == [0.0, 1.0]
    assert found.trust[0].tolist() == [1.0, 0.5]


def test_the_nearest_copies_by_hand():
    left = torch.tensor([0.0, 2.0, 9.0])
    weights = torch.tensor([[3.0, 4.0, 2.0], [1.0, 1.0, 5.0], [1.0, 1.0, 1.0]])
    own, counted = nearest_copies(left, weights, 5)
    assert own.tolist() == [0, 2, 5]  # a row of nine other copies asks five of them
    assert counted.tolist() == [[3, 2, 0], [1, 1, 1], [0, 0, 0]]


def test_a_row_of_many_copies_is_judged_by_its_own_kind_first():
    weights = torch.tensor([4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    labels = torch.tensor([0, 1, 0, 1, 1, 1, 1, 1])
    rows = torch.from_numpy(unit(np.arange(16).reshape(8, 2) + 1))
    ids = torch.tensor([[other for other in range(8) if other != row] for row in range(8)])
    view = LabelView(rows, labels, lambda: ids, n_classes=2, weights=weights)
    # Seven copies judge row 0: its own other three, three of row 1 and one of row 2.
    torch.testing.assert_close(view.histograms[0], torch.tensor([4 / 7, 3 / 7]))
    # Row 2 is judged by its other copy, four of row 0 and two of row 1.
    torch.testing.assert_close(view.histograms[2], torch.tensor([5 / 7, 2 / 7]))
