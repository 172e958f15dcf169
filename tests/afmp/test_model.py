"""AFMP: scaffold, edges, router, model; each published fault has a test that it is gone.

A test of a fault is run on the published model too, where it must fail.
"""

import dataclasses
import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from attnknn.afmp import model as units
from attnknn.afmp.edges import Edges, batch_graph, gated_sum
from attnknn.afmp.graph import (
    AFMP_SMALL,
    AFMP_TINY,
    AFMPConfig,
    build_scaffold,
    grid_scaffold,
    patch_centres,
)
from attnknn.afmp.model import AFMP, AFMPTrunk, PredictiveRouter, kept_edges
from attnknn.afmp.published import PublishedAFMP, one_way_edges, published_cache_key

B, C, SIDE, PATCH = 5, 3, 12, 4
CPU = torch.device("cpu")


def small(**changes) -> AFMPConfig:
    """Return a small model on 12 x 12 images: 3 x 3 patches, 3 layers of width 8."""
    return AFMPConfig(**{"layers": 3, "width": 8, "patch": PATCH, "keep_share": 0.5} | changes)


def build(kind=AFMP, seed=0, **changes):
    """Return a seeded model in float64, where batch sizes change nothing but the last digits."""
    torch.manual_seed(seed)
    model = kind(small(**changes), C, channels=2).double()
    for layer in model.trunk.layers:  # scores far apart: no near ties, gates away from 1/2
        torch.nn.init.normal_(layer.router.bilinear)
    return model


def images(n_images=B, seed=1, side=SIDE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_images, 2, side, side, generator=generator, dtype=torch.float64)


class TestScaffold:
    """Points to edges."""

    def test_a_square_by_hand(self):
        scaffold = build_scaffold(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.1, 1.1]]))
        pairs = set(zip(scaffold.sources.tolist(), scaffold.targets.tolist(), strict=True))
        sides = {(0, 1), (0, 2), (1, 3), (2, 3), (1, 2)}  # the short diagonal joins 1 and 2
        assert pairs == sides | {(b, a) for a, b in sides}
        length = {pair: scaffold.lengths[place] for place, pair in enumerate(_ordered(scaffold))}
        assert length[1, 2] == length[2, 1] == pytest.approx(2**0.5)

    @pytest.mark.parametrize("kind", ["delaunay", "window"])
    def test_fault_24_every_edge_runs_both_ways(self, kind):
        scaffold = grid_scaffold(20, 28, 4, kind=kind, window=3)
        pairs = set(_ordered(scaffold))
        assert pairs == {(b, a) for a, b in pairs}
        assert len(pairs) == scaffold.n_edges and all(a != b for a, b in pairs)
        published = {(a, b) for a, b in one_way_edges(scaffold)[0].T.tolist()}
        assert not published & {(b, a) for a, b in published}

    def test_fault_24_the_cache_goes_by_content(self):
        one = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 1.0], [4.0, 1.0], [2.0, 0.5]])
        two = one[:, ::-1].copy()  # same count, same mean, other triangles
        assert published_cache_key(one) == published_cache_key(two)
        assert build_scaffold(one) is build_scaffold(one.copy())
        other = build_scaffold(two)
        assert other is not build_scaffold(one)
        np.testing.assert_array_equal(other.points, two)

    def test_fault_24_the_hierarchy_is_not_the_identity(self):
        scaffold = grid_scaffold(12, 20, 4)  # 3 x 5 patches: 2 x 3 blocks
        assert scaffold.parents.reshape(3, 5).tolist() == [
            [0, 0, 2, 2, 4],
            [0, 0, 2, 2, 4],
            [1, 1, 3, 3, 5],
        ]
        graph = batch_graph(scaffold, 2, CPU)
        rows = torch.arange(30.0)[:, None]
        means = graph.spread_blocks(rows)[:, 0]
        assert means[[0, 1, 5, 6]].tolist() == [3.0] * 4  # mean of 0, 1, 5, 6
        assert means[15] == 18.0  # the second image has blocks of its own

    def test_a_window_by_hand(self):
        scaffold = build_scaffold(np.array([[0.0], [1.0], [3.0], [4.0]]), kind="window", window=2)
        assert _ordered(scaffold) == [
            *[(1, 0), (2, 0), (0, 1), (2, 1), (3, 1)],
            *[(0, 2), (1, 2), (3, 2), (1, 3), (2, 3)],
        ]
        assert scaffold.lengths.tolist() == [1, 3, 1, 2, 3, 3, 2, 1, 3, 1]

    def test_a_window_takes_memory_for_its_own_pairs_only(self):
        tracemalloc.start()
        scaffold = build_scaffold(np.arange(5003.0)[:, None], kind="window", window=3)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert scaffold.n_edges == 2 * (5002 + 5001 + 5000)
        assert peak < 10e6  # all pairs of points would be 200 MB

    def test_a_window_wider_than_the_points_joins_all(self):
        scaffold = build_scaffold(np.arange(5.0)[:, None], kind="window", window=99)
        assert scaffold.n_edges == 5 * 4

    def test_delaunay_edges_grow_with_the_points(self):
        for side in (64, 224, 448):
            scaffold = grid_scaffold(side, side, 16)
            cells = side // 16 - 1
            undirected = 2 * cells * (cells + 1) + cells**2  # sides of the grid, one diagonal each
            assert scaffold.n_edges == 2 * undirected
            assert np.bincount(scaffold.targets).max() <= 8

    @pytest.mark.parametrize(
        ("points", "options", "message"),
        [
            (np.zeros((2, 2)), {}, "at least 3 pairs"),
            (np.zeros((5, 3)), {}, "at least 3 pairs"),
            (np.array([[0.0, 0], [1, 1], [2, 2]]), {}, "one line"),
            (np.array([[0.0, 0], [1, 0], [0, 1], [0, 1]]), {}, "all be different"),
            (np.array([[0.0, np.nan]] * 4), {}, "finite"),
            (np.zeros((1, 1)), {"kind": "window"}, "at least 2"),
            (np.zeros((4, 2)), {"kind": "ring"}, "kind must be one of"),
            (np.zeros((4, 2)), {"window": 0}, "window must be"),
        ],
    )
    def test_bad_points_are_refused(self, points, options, message):
        with pytest.raises(ValueError, match=message):
            build_scaffold(points, **options)

    def test_an_image_must_be_a_multiple_of_the_patch(self):
        with pytest.raises(ValueError, match="width must be a multiple of patch=4, got width=30"):
            patch_centres(32, 30, 4)
        with pytest.raises(ValueError, match="use smaller patches"):
            grid_scaffold(8, 8, 8)

    def test_centres_are_in_reading_order(self):
        assert patch_centres(8, 12, 4).tolist() == [
            *[[0.5, 0.5], [1.5, 0.5], [2.5, 0.5]],
            *[[0.5, 1.5], [1.5, 1.5], [2.5, 1.5]],
        ]


def _ordered(scaffold):
    return list(zip(scaffold.sources.tolist(), scaffold.targets.tolist(), strict=True))


class TestEdges:
    """Values on edges against plain indexing, forwards and backwards."""

    edges = Edges(torch.tensor([2, 0, 2, 1, 0]), torch.tensor([0, 1, 1, 2, 4]), 5)

    def test_against_plain_indexing(self):
        left, right = torch.randn(2, 5, 7, dtype=torch.float64)
        sources, targets = self.edges.sources, self.edges.targets
        torch.testing.assert_close(self.edges.from_sources(left), left[sources])
        torch.testing.assert_close(self.edges.from_targets(left), left[targets])
        products = (left[targets] * right[sources]).sum(dim=1)
        torch.testing.assert_close(self.edges.dot(left, right), products)
        sums = torch.zeros(5, 7, dtype=torch.float64).index_add(0, targets, left[sources])
        torch.testing.assert_close(self.edges.sum_at_targets(left[sources]), sums)
        assert (sums[3] == 0).all()

    def test_gradients(self):
        rows = [torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        for action in (
            self.edges.from_sources,
            self.edges.from_targets,
            self.edges.sum_at_targets,
        ):
            assert torch.autograd.gradcheck(action, rows[:1])
        assert torch.autograd.gradcheck(self.edges.dot, rows)

    @pytest.mark.parametrize("buffer", [1, 1000])
    def test_gated_sums(self, monkeypatch, buffer):
        """Two images of 3 points; with a buffer of 1 each image is a chunk of its own."""
        monkeypatch.setattr("attnknn.afmp.edges.BUFFER_NUMBERS", buffer)
        edges = Edges(torch.tensor([1, 2, 0, 4, 3, 4]), torch.tensor([0, 0, 2, 3, 5, 5]), 6)
        values, scores, weight, bias = (
            torch.randn(shape, dtype=torch.float64, requires_grad=True)
            for shape in ((6, 4), (2, 3), (4,), (4,))
        )
        sums, total = gated_sum(values, scores, weight, bias, edges)
        gates = torch.sigmoid(scores.reshape(-1, 1) * weight + bias)
        messages = gates * values[edges.sources]
        torch.testing.assert_close(total, gates.sum())
        expected = torch.zeros_like(values).index_add(0, edges.targets, messages)
        torch.testing.assert_close(sums, expected)
        inputs = (values, scores, weight, bias)
        assert torch.autograd.gradcheck(lambda *args: gated_sum(*args, edges), inputs)


class TestSizes:
    """Parameters and settings."""

    @pytest.mark.parametrize(
        ("config", "expected"), [(AFMP_TINY, 435_688), (AFMP_SMALL, 6_119_913)]
    )
    def test_parameters_at_100_classes(self, config, expected):
        assert sum(p.numel() for p in AFMP(config, 100).parameters()) == expected

    def test_deit_tiny_beside_it(self):
        timm = pytest.importorskip("timm")
        model = timm.create_model("deit_tiny_patch16_224", num_classes=100)
        assert sum(p.numel() for p in model.parameters()) == 5_543_716

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"keep_share": -0.1}, "keep_share must be at least 0"),
            ({"keep_share": 1.5}, "keep_share must be"),
            ({"layers": 0}, "layers must be"),
            ({"sparse_weight": -1.0}, "sparse_weight must be"),
            ({"scaffold": "ring"}, "scaffold must be one of"),
        ],
    )
    def test_bad_settings_are_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            small(**changes)

    def test_bad_images_are_refused(self):
        model = build()
        with pytest.raises(ValueError, match="images must have shape"):
            model(images()[:0])
        with pytest.raises(ValueError, match="height must be a multiple"):
            model(images(side=10))


def reference(model: AFMP, image: torch.Tensor) -> torch.Tensor:
    """Return the logits of one image, edge by edge, straight from the equations."""
    trunk, config = model.trunk, model.config
    n = SIDE // PATCH
    cells = [(y, x) for y in range(n) for x in range(n)]
    pixels = torch.stack(
        [
            image[:, y * PATCH : (y + 1) * PATCH, x * PATCH : (x + 1) * PATCH].flatten()
            for y, x in cells
        ]
    )
    places = torch.tensor([[2 * (x + 0.5) / n - 1, 2 * (y + 0.5) / n - 1] for y, x in cells])
    embedded = trunk.patches(pixels) + trunk.places(places.double())
    scaffold = trunk.scaffold(image[None])
    edges = [*zip(scaffold.targets, scaffold.sources, scaffold.lengths, strict=True)]

    def layer_states(layer, states, above):
        router, unit = layer.router, layer.unit
        scores = []
        for i, j, length in edges:
            predicted = 0.0 if above is None else router.prediction(above[i])
            error = (states[j] - predicted).norm()
            pair = torch.stack([error, torch.tensor(length)])
            hidden = router.hidden(torch.cat([states[i], states[j], pair])).relu()
            product = router.query(states[i]) @ router.bilinear @ router.key(states[j])
            scores.append(product + router.score(hidden)[0])
        kept = torch.stack(scores).argsort(descending=True)[: round(config.keep_share * len(edges))]
        heard = [torch.zeros(config.width, dtype=torch.float64) for _ in cells]
        for place in kept.tolist():
            i, j, _ = edges[place]
            gate = torch.sigmoid(router.gate(scores[place][None]))
            heard[i] = heard[i] + gate * unit.message(states[j])
        return F.gelu(unit.own(states) + torch.stack(heard))

    levels = [embedded]
    for layer in trunk.layers:
        levels.append(layer_states(layer, levels[-1], None))
    if trunk.top_down is not None:
        refined, feedback = {len(trunk.layers): levels[-1]}, {}
        for level in range(len(trunk.layers) - 1, 0, -1):
            above = refined[level + 1]
            members = [scaffold.parents == parent for parent in scaffold.parents]
            means = torch.stack([above[torch.from_numpy(own)].mean(dim=0) for own in members])
            feedback[level] = trunk.top_down.maps[level - 1](means)
            refined[level] = levels[level] + feedback[level]
        states = embedded
        for level, layer in enumerate(trunk.layers, start=1):
            states = layer_states(layer, states + feedback.get(level - 1, 0.0), refined[level])
        levels.append(states)
    return model.readout(levels[-1].mean(dim=0))


@pytest.mark.parametrize("top_down", [False, True])
@pytest.mark.parametrize("keep_share", [0.0, 0.3, 1.0])
def test_the_model_is_its_equations(top_down, keep_share):
    model = build(top_down=top_down, keep_share=keep_share)
    batch = images(3)
    expected = torch.stack([reference(model, image) for image in batch])
    torch.testing.assert_close(model(batch), expected, rtol=1e-6, atol=1e-8)


def exchanges(model, batch, image: int) -> bool:
    """Return whether what an image is made of reaches patches that are not its own.

    Without messages, the mean over patches is a sum of one term a patch: two changes in different
    patches then add up exactly.
    """
    corner, centre = torch.zeros_like(batch), torch.zeros_like(batch)
    corner[image, :, :PATCH, :PATCH], centre[image, :, PATCH : 2 * PATCH, PATCH : 2 * PATCH] = 3, 3
    with torch.no_grad():
        plain, one, two, both = (
            model(batch + change)[image] for change in (0, corner, centre, corner + centre)
        )
    return not torch.allclose(both - plain, (one - plain) + (two - plain), atol=1e-9)


@pytest.mark.parametrize("top_down", [False, True])
def test_fault_20_every_image_exchanges_messages(top_down):
    batch = images()
    model, faulty = build(top_down=top_down), build(PublishedAFMP, top_down=top_down)
    assert [exchanges(model, batch, place) for place in range(B)] == [True] * B
    assert [exchanges(faulty, batch, place) for place in range(B)] == [True] + [False] * (B - 1)


class TestSparsity:
    """Fault 21: exactly the asked share is kept, in each image, and the rest carries nothing."""

    @pytest.mark.parametrize("keep_share", [0.0, 0.2, 0.3, 0.6, 1.0])
    def test_fault_21_exactly_the_share_is_kept_in_every_image(self, keep_share):
        model = build(keep_share=keep_share)
        n_edges = model.trunk.scaffold(images()).n_edges
        for layer in model.gates(images()):
            assert layer.kept.sum(dim=1).tolist() == [round(keep_share * n_edges)] * B
            assert (layer.gates[~layer.kept] == 0).all() and (layer.gates[layer.kept] > 0).all()

    def test_fault_21_the_published_model_prunes_nothing(self):
        """Its count exceeds the edges; where it does not, masked gates stay open."""
        faulty = build(PublishedAFMP, keep_share=0.3)
        (pairs, _) = one_way_edges(faulty.trunk.scaffold(images()))
        assert int(0.3 * 9 * faulty.batch_size) > pairs.shape[1]
        faulty.batch_size = 1  # now two edges are "kept"
        opened = faulty.opened(images())[0]
        bias = torch.sigmoid(faulty.trunk.layers[0].router.gate.bias)
        masked = torch.isclose(opened, bias).all(dim=1)
        assert masked.sum() == pairs.shape[1] - 2 and (opened[masked] > 0.2).all()

    def test_fault_21_a_pruned_edge_carries_exactly_nothing(self):
        """Along a pruned edge, no change of what is said arrives."""
        model = build(layers=1, top_down=False, keep_share=0.3)
        layer, graph = model.trunk.layers[0], batch_graph(grid_scaffold(12, 12, 4), 1, CPU)
        states = torch.randn(9, 8, dtype=torch.float64)
        routed = layer.router(states, graph)
        said = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
        gate = layer.router.gate
        heard, _ = gated_sum(said, routed.scores, gate.weight[:, 0], gate.bias, routed.edges)
        kept = set(zip(routed.edges.targets.tolist(), routed.edges.sources.tolist(), strict=True))
        for target in range(9):
            slope = torch.autograd.grad(heard[target].sum(), said, retain_graph=True)[0]
            heard_from = {source for source in range(9) if (slope[source] != 0).any()}
            assert heard_from == {source for t, source in kept if t == target}

    @pytest.mark.parametrize(("top_down", "n_passes"), [(False, 1), (True, 2)])
    def test_fault_21_messages_of_pruned_edges_are_never_computed(
        self, monkeypatch, top_down, n_passes
    ):
        """What makes gates and messages is called once a layer and pass, for kept edges only."""
        made = []

        def noting(values, scores, weight, bias, edges):
            made.append((len(edges.sources), len(edges.targets), tuple(scores.shape)))
            return gated_sum(values, scores, weight, bias, edges)

        monkeypatch.setattr(units, "gated_sum", noting)
        model = build(keep_share=0.3, top_down=top_down)
        passage = model.trunk.passage(images())
        n_kept = kept_edges(passage.graph.n_edges, 0.3)
        assert n_kept < passage.graph.n_edges
        n_layers = len(model.trunk.layers)
        assert made == [(B * n_kept, B * n_kept, (B, n_kept))] * (n_layers * n_passes)
        for layer in passage.layers:
            assert len(layer.routed.edges.sources) == B * n_kept
            assert layer.routed.scores.shape == (B, n_kept)

    def test_at_a_share_of_0_no_patch_hears_another(self, monkeypatch):
        """The control without messages: nothing is scored, and what can learn does."""
        batch, model = images(), build(keep_share=0.0, top_down=False)
        assert not any(exchanges(model, batch, place) for place in range(B))
        assert exchanges(build(keep_share=0.3, top_down=False), batch, 0)
        monkeypatch.setattr(PredictiveRouter, "scores", None)
        logits, penalty = model.logits_and_penalty(batch)
        (F.cross_entropy(logits, torch.arange(B) % C) + penalty).backward()
        assert penalty == 0
        for layer in model.trunk.layers:
            assert layer.unit.own.weight.grad.abs().max() > 0
            assert not layer.unit.message.weight.grad.any()
            assert not layer.router.gate.bias.grad.any()

    def test_the_highest_scores_are_kept(self):
        model = build(keep_share=0.3, top_down=False)
        router, batch = model.trunk.layers[0].router, images()
        graph = batch_graph(model.trunk.scaffold(batch), B, CPU)
        states = torch.randn(B * 9, 8, dtype=torch.float64)
        scores = router.scores(states, graph).view(B, -1)
        routed = router(states, graph)
        best = scores.sort(dim=1, descending=True).values[:, : routed.scores.shape[1]]
        torch.testing.assert_close(routed.scores.sort(dim=1, descending=True).values, best)

    def test_gradients_reach_the_scores(self):
        model = build(keep_share=0.3)
        F.cross_entropy(model(images()), torch.arange(B) % C).backward()
        for layer in model.trunk.layers:
            router = layer.router
            for part in (router.bilinear, router.query.weight, router.score.weight):
                assert part.grad.abs().max() > 0

    def test_equal_scores_are_still_counted_exactly(self):
        model = build(keep_share=0.4)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        for layer in model.gates(images()):
            assert (layer.kept.sum(dim=1) == kept_edges(layer.kept.shape[1], 0.4)).all()
            assert (layer.gates[layer.kept] == 0.5).all()

    def test_the_penalty_is_the_weighted_mean_gate(self):
        model = build(keep_share=0.3, sparse_weight=0.7)
        penalty = model.logits_and_penalty(images())[1]
        means = torch.stack([layer.gates.mean() for layer in model.gates(images())])
        torch.testing.assert_close(penalty, 0.7 * means.mean())
        assert build(keep_share=1.0, sparse_weight=0.7).logits_and_penalty(images())[1] == 0


class TestTopDown:
    """Faults 22 and 23: what comes from above is a prediction, and it changes the output."""

    def parameters(self, model):
        return [*model.trunk.top_down.parameters()]

    def test_fault_22_top_down_parameters_receive_gradient(self):
        model, faulty = build(), build(PublishedAFMP)
        for each in (model, faulty):
            F.cross_entropy(each(images()), torch.arange(B) % C).backward()
        assert all(p.grad.abs().max() > 0 for p in self.parameters(model))
        assert all(p.grad is None for p in self.parameters(faulty))

    def test_fault_22_the_top_down_pass_changes_the_output(self):
        model, faulty, batch = build(), build(PublishedAFMP), images()
        for each, moved in ((model, True), (faulty, False)):
            before = each(batch)
            with torch.no_grad():
                for parameter in self.parameters(each):
                    parameter.mul_(-2)
            assert torch.equal(before, each(batch)) is not moved

    def test_fault_23_the_prediction_comes_from_the_layer_above(self):
        """The first layer's routing depends on the last layer's weights; as published it cannot."""
        model, faulty, batch = build(), build(PublishedAFMP), images()

        def first_scores(each):
            if isinstance(each, PublishedAFMP):
                return each.opened(batch)[0]
            return each.trunk.passage(batch).layers[0].mean_gate

        for each, moved in ((model, True), (faulty, False)):
            before = first_scores(each)
            with torch.no_grad():
                each.trunk.layers[-1].unit.own.weight.add_(0.5)
            assert torch.equal(before, first_scores(each)) is not moved

    def test_fault_23_errors_by_hand(self):
        """A perfect prediction has error 0; without one, the error is all that was sent."""
        router = build().trunk.layers[0].router
        with torch.no_grad():
            router.prediction.weight.copy_(torch.eye(8))
            router.prediction.bias.zero_()
        edges = Edges(torch.tensor([1, 0]), torch.tensor([0, 1]), 2)
        states = torch.tensor([[3.0, 4.0] + [0.0] * 6, [0.0] * 8], dtype=torch.float64)
        above = states.flip(0)
        torch.testing.assert_close(
            router.errors(states, edges), torch.tensor([0.0, 5.0]).double(), atol=2e-6, rtol=0
        )
        assert router.errors(states, edges, above).max() < 2e-6
        torch.testing.assert_close(
            router.errors(states, edges, states), torch.tensor([5.0, 5.0]).double()
        )

    def test_without_top_down_there_are_no_idle_parameters(self):
        model = build(top_down=False)
        F.cross_entropy(model(images()), torch.arange(B) % C).backward()
        idle = [name for name, p in model.named_parameters() if p.grad is None]
        assert not idle and model.trunk.top_down is None


class TestBatches:
    """Fault 25: an image's result depends on the image alone."""

    @pytest.mark.parametrize("top_down", [False, True])
    @pytest.mark.parametrize("keep_share", [0.3, 1.0])
    def test_fault_25_batch_size_and_mates_change_nothing(self, top_down, keep_share):
        model, batch = build(top_down=top_down, keep_share=keep_share), images()
        together = model(batch)
        alone = torch.cat([model(image[None]) for image in batch])
        torch.testing.assert_close(together, alone)
        mates = torch.cat([images(2, seed=9), batch[2:3], images(4, seed=8)])
        torch.testing.assert_close(model(mates)[2], together[2])
        torch.testing.assert_close(model(batch.flip(0)).flip(0), together)

    @pytest.mark.parametrize("top_down", [False, True])
    @pytest.mark.parametrize("keep_share", [0.3, 1.0])
    def test_fault_25_nothing_changes_in_float32_either(self, top_down, keep_share):
        """The precision, and on a CPU the products, that users have."""
        model = build(top_down=top_down, keep_share=keep_share).float()
        batch = images(11).float()
        together = model(batch)
        alone = torch.cat([model(image[None]) for image in batch])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)

    def test_fault_25_the_published_model_depends_on_its_mates(self):
        faulty, batch = build(PublishedAFMP), images()
        alone = torch.cat([faulty(image[None]) for image in batch])
        assert not torch.allclose(faulty(batch), alone)
        before = build(PublishedAFMP, keep_share=0.3)
        small_global = build(PublishedAFMP, keep_share=0.3)
        small_global.batch_size = 1
        assert not torch.allclose(before(batch), small_global(batch))

    def test_looking_in_inference_mode_does_not_spoil_training(self):
        """Graphs are kept for later batches of the same size."""
        batch_graph.cache_clear()
        model = AFMP(dataclasses.replace(AFMP_TINY, layers=2, width=8, patch=2), 3)
        images = torch.rand(5, 3, 8, 8)
        with torch.inference_mode():
            model(images)
        model(images).sum().backward()
        assert all(p.grad is not None for p in model.trunk.parameters())

    def test_one_image_trains(self):
        model = build()
        logits, penalty = model.logits_and_penalty(images(1))
        (F.cross_entropy(logits, torch.tensor([1])) + penalty).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    def test_gradients_do_not_depend_on_the_batch(self):
        batch, labels = images(), torch.arange(B) % C
        gradients = []
        for rows in (batch.split(B), batch.split(2)):
            model, start = build(), 0
            for part in rows:
                wanted = labels[start : start + len(part)]
                F.cross_entropy(model(part), wanted, reduction="sum").backward()
                start += len(part)
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        torch.testing.assert_close(*gradients)

    def test_the_same_seed_gives_the_same_bits(self):
        def run():
            model = build().float()
            batch = images().float()
            F.cross_entropy(model(batch), torch.arange(B) % C).backward()
            return [model(batch).detach(), *(p.grad for p in model.parameters())]

        assert all(torch.equal(one, two) for one, two in zip(run(), run(), strict=True))

    @pytest.mark.parametrize("top_down", [False, True])
    def test_the_same_bits_with_many_edges_and_two_threads(self, top_down):
        """From 32 768 numbers on, torch adds up the gradient of plain indexing in any order."""
        scaffold = grid_scaffold(96, 96, 4)
        n_images = 32_768 // scaffold.n_edges + 1
        graph = batch_graph(scaffold, n_images, CPU)
        router = build().float().trunk.layers[0].router
        rows = torch.randn(n_images * scaffold.n_points, 8)
        above = rows.flip(0) if top_down else None
        weights = torch.randn(len(graph.edges.sources))

        def gradient():
            states = rows.clone().requires_grad_()
            (router.errors(states, graph.edges, above) * weights).sum().backward()
            return states.grad

        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            first, *others = (gradient() for _ in range(20))
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(first, other) for other in others)

    def test_rectangles_and_other_sizes(self):
        model = build()
        wide = torch.randn(2, 2, 12, 20, dtype=torch.float64)
        assert model(wide).shape == (2, C)
        assert model(images(side=16)).shape == (B, C)

    def test_a_window_instead_of_triangles(self):
        model = build(scaffold="window", window=2)
        assert model.trunk.scaffold(images()).n_edges == 2 * (8 + 7)
        assert exchanges(model, images(), 1)


def test_the_published_model_keeps_to_the_device_of_its_images():
    """On a device that is only pretended: a list of edges that stays on the CPU is refused."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model = PublishedAFMP(small(), C, channels=2)
        assert model(torch.randn(B, 2, SIDE, SIDE, device="cuda")).device.type == "cuda"


def test_the_trunk_is_a_backbone():
    trunk = AFMPTrunk(small(), channels=2)
    assert trunk(images().float()).shape == (B, trunk.out_dim)


def test_dense_is_the_limit_of_keeping_everything():
    dense, nearly = build(keep_share=1.0), build(keep_share=0.999)  # rounds to all edges
    torch.testing.assert_close(dense(images()), nearly(images()))
    assert dataclasses.replace(AFMP_TINY, keep_share=1.0).is_dense
