"""The recipes at tiny sizes: they learn, repeat to the bit, and compute what they say."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import plot
import swin_moe
import training
import transformer_xl

PACE = training.Pace(steps=2, every=1, rate=5e-3, warmup=1, decay=0.01, seeds=1)
XL = transformer_xl.Shape(dim=16, heads=2, layers=2, hidden=32, segment=8, memory=8, experts=4)
SWIN = swin_moe.Shape(dim=16, depths=(2, 2), experts=4)
TEXT = bytes(range(64)) * 40


class FixedImages:
    """A Swin on one batch of random images, which is held out as well."""

    def __init__(self, moe, shape=SWIN):
        self.model = swin_moe.Swin(shape, moe)
        random = torch.Generator().manual_seed(1)
        self.images = torch.randn(8, 1, 8, 8, generator=random)
        self.labels = torch.randint(10, (8,), generator=random)

    def loss(self, step):
        logits = self.model(self.images)
        loss = torch.nn.functional.cross_entropy(logits, self.labels)
        return loss + swin_moe.AUX_WEIGHT * self.model.auxiliary_loss()

    def held_out(self):
        return self.loss(0).item(), 0.5


class FixedText(transformer_xl.TextRun):
    """A Transformer-XL on the first segment alone."""

    def __init__(self, moe):
        super().__init__(XL, moe, 0, TEXT, streams=4)

    def loss(self, step):
        return super().loss(0)

    def held_out(self):
        return self.loss(0).item(), 0.5


@pytest.mark.parametrize("run", [FixedImages, FixedText])
def test_recipes_learn_and_repeat_to_the_bit(run):
    results = [training.compare(lambda moe, seed: run(moe), PACE) for _ in range(2)]
    assert results[0] == results[1]
    for model in results[0]["models"].values():
        first, second = (point["loss"] for point in model["runs"][0])
        assert torch.isfinite(torch.tensor([first, second])).all() and second < first


def test_a_cosine_router_learns():
    torch.manual_seed(0)
    run = FixedImages(True, swin_moe.Shape(dim=16, experts=4, cosine_router=True))
    first, second = (point["loss"] for point in training.train(run, PACE))
    assert second < first


def test_digits_are_held_out_once():
    pytest.importorskip("sklearn")
    run = swin_moe.DigitsRun(SWIN, False, 0)
    assert len(run.seen[1]) == 1438 and len(run.unseen[1]) == 359
    assert torch.isfinite(run.loss(0)) and 0 <= run.held_out()[1] <= 1


def test_shifted_windows_see_no_pixel_across_the_border():
    torch.manual_seed(0)
    block = swin_moe.Block(8, 16, 2, True, False, SWIN)
    x = torch.randn(1, 8, 8, 16, requires_grad=True)
    # Pixel (0, 0) is alone with its quarter of the shifted window.
    (grad,) = torch.autograd.grad(block(x)[0, 0, 0].square().sum(), x)
    # The mask of -100 leaves a share that is no more than the smallest numbers of f32.
    seen = grad[0].abs().sum(-1) > 1e-12
    wanted = torch.zeros(8, 8, dtype=torch.bool)
    wanted[:2, :2] = True
    assert torch.equal(seen, wanted)


def test_memory_continues_a_segment():
    """With one layer, a segment after its memory has the logits it has within one long segment."""
    torch.manual_seed(0)
    shape = transformer_xl.Shape(dim=16, heads=2, layers=1, hidden=32, memory=8, experts=4)
    model = transformer_xl.TransformerXL(shape, True)
    for bias in (model.layers[0].attention.content_bias, model.layers[0].attention.place_bias):
        torch.nn.init.normal_(bias)
    ids = torch.randint(256, (2, 16))
    whole, _ = model(ids)
    first, memories = model(ids[:, :8])
    second, _ = model(ids[:, 8:], memories)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-4, atol=1e-5)
    # No byte sees a later one.
    other = ids.clone()
    other[:, 12:] = 0
    torch.testing.assert_close(model(other)[0][:, :12], whole[:, :12], rtol=1e-4, atol=1e-5)


def test_attention_is_by_distance():
    torch.manual_seed(0)
    model = transformer_xl.TransformerXL(XL, False)
    attention = model.layers[0].attention
    torch.nn.init.normal_(attention.content_bias)
    torch.nn.init.normal_(attention.place_bias)
    x, memory = torch.randn(1, 5, 16), torch.randn(1, 3, 16)
    places = model._places(8)
    q, keys = attention.query(x)[0], torch.cat([memory, x], 1)[0]
    k, v = attention.pair(keys).chunk(2, -1)
    rows = []
    for i in range(5):
        out = []
        for head, part in enumerate((slice(0, 8), slice(8, 16))):
            u, w = attention.content_bias[head, 0], attention.place_bias[head, 0]
            # The last row of places is distance 0, and the one before it distance 1.
            far = [attention.distance(places[7 - (3 + i - j)])[part] for j in range(4 + i)]
            scores = [(q[i, part] + u) @ k[j, part] + (q[i, part] + w) @ far[j]
                      for j in range(4 + i)]
            out.append((torch.stack(scores) / 8**0.5).softmax(0) @ v[: 4 + i, part])
        rows.append(attention.out(torch.cat(out)))
    found = attention(x, memory, places)[0]
    torch.testing.assert_close(found, torch.stack(rows), rtol=1e-4, atol=1e-5)


def test_a_result_is_drawn():
    run = [{"step": s, "training": 1.0, "loss": 2.0 / s, "accuracy": 0.1 * s} for s in (1, 2)]
    models = {name: {"parameters": 7, "runs": [run, run]} for name in ("dense", "experts")}
    result = {"title": "t", "unit": "nats", "models": models}
    assert plot.svg(result).count("<path") >= 8 and "2.0000" in training.table(result)
