"""Folders of photographs: what is listed, what an epoch visits, what mixing and dropping do."""

import numpy as np
import pytest
import torch

import train_imagenet
from inputs.augment import mix
from inputs.folders import epoch_order, erased, middle_box, random_box, read_folder
from vit import Block, ViT


def make(root, **classes):
    for name, files in classes.items():
        (root / name).mkdir(parents=True)
        for file in files:
            (root / name / file).parent.mkdir(parents=True, exist_ok=True)
            (root / name / file).touch()
    return root


# ---- what is listed


def test_classes_are_the_folders_in_sorted_order_and_files_lie_anywhere_below(tmp_path):
    root = make(tmp_path, dog=["b.JPG", "a.png", "notes.txt"], cat=["deep/down/c.webp"])
    (root / ".cache").mkdir()
    (root / "readme.jpg").touch()
    folder = read_folder(root)
    assert folder.classes == ("cat", "dog") and folder.labels == [0, 1, 1]
    assert [file.replace("\\", "/") for file in folder.files] == ["cat/deep/down/c.webp", "dog/a.png", "dog/b.JPG"]


def test_labels_of_val_are_those_of_train_even_where_it_lacks_a_class(tmp_path):
    root = make(tmp_path, b=["1.jpg"], c=["2.jpg"])
    assert read_folder(root, ("a", "b", "c")).labels == [1, 2]


@pytest.mark.parametrize(
    "classes, words",
    [
        ({}, "two classes or more; it holds none"),
        ({"cat": ["a.jpg"]}, "two classes or more; it holds cat"),
        ({"cat": ["a.jpg"], "dog": ["a.txt"]}, "dog holds no images"),
        ({"cat": ["a.jpg"], "cow": ["a.jpg"]}, "has classes that train has not: cow"),
    ],
)
def test_folders_that_are_no_classification_are_refused(tmp_path, classes, words):
    with pytest.raises(ValueError, match=words):
        read_folder(make(tmp_path, **classes), ("cat", "dog") if "cow" in classes else None)
    with pytest.raises(FileNotFoundError, match="there is no folder .*nowhere"):
        read_folder(tmp_path / "nowhere")


# ---- what an epoch visits


def order(n, batch, repeats, epoch=0):
    return epoch_order(n, batch, repeats, torch.Generator().manual_seed(epoch))


def test_without_repeats_an_epoch_is_a_permutation_of_all_images():
    assert order(103, 10, 1).sort().values.tolist() == list(range(103))
    assert not torch.equal(order(103, 10, 1), order(103, 10, 1, epoch=1))


@pytest.mark.parametrize("n, batch", [(999, 30), (1000, 32), (10, 64), (7, 2)])
def test_repeated_augmentation_shows_each_image_of_a_batch_three_times_and_n_places_an_epoch(n, batch):
    places = order(n, batch, 3)
    assert len(places) == n
    for part in places.split(batch):
        counts = part.bincount(minlength=n)
        assert counts.max() <= 3 and len(part) // 3 <= (counts > 0).sum()
        if len(part) == batch <= n:
            assert (counts > 0).sum() == -(-batch // 3)  # 32 places: ten images thrice and one twice
    if batch <= n:
        batches_ = places.split(batch)
        assert not set(batches_[0].tolist()) & set(batches_[1].tolist())  # an image is in one batch of an epoch


def test_repeated_augmentation_reaches_every_image_equally_often_over_epochs():
    visits = sum(order(60, 12, 3, epoch).bincount(minlength=60) for epoch in range(300))
    assert visits.sum() == 300 * 60 and visits.min() > 200 and visits.max() < 400  # 300 each, in threes


def test_copies_of_an_image_are_never_the_neighbours_that_mixing_mixes():
    for part in order(1000, 64, 3).split(64):
        assert (part[0::2] != part[1::2]).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_crops_of_all_ranks_are_those_of_one_and_a_resumed_run_goes_on_with_them(monkeypatch, count):
    s = train_imagenet.Settings(batch_size=8, repeats=3)

    def steps(first, count, rank):
        monkeypatch.setenv("WORLD_SIZE", str(count))
        monkeypatch.setenv("RANK", str(rank))
        return list(train_imagenet.plan(s, 0, 20, first, 6))

    whole = steps(0, 1, 0)
    shares = [steps(0, count, rank) for rank in range(count)]
    assert [sum((share[i] for share in shares), []) for i in range(6)] == whole
    assert [len(step) for step in whole] == [8, 8, 4] * 2 and steps(4, 1, 0) == whole[4:]
    seeds = [seed for step in whole for _, seed in step]
    assert len(set(seeds)) == len(seeds)  # each crop of an image is another
    first, second = ([index for step in epoch for index, _ in step] for epoch in (whole[:3], whole[3:]))
    assert max(map(first.count, first)) == 3 and first != second
    monkeypatch.undo()
    another = list(train_imagenet.plan(s, 1, 20, 0, 6))
    assert [index for step in another for index, _ in step] != first + second
    assert not {seed for step in another for _, seed in step} & set(seeds)


# ---- mixing


def numbered(batch):
    """Images whose pixels tell which image they were, and their one-hot targets."""
    return torch.arange(batch).float().view(-1, 1, 1, 1).expand(-1, 3, 16, 16), torch.eye(batch)


class Fixed:
    """A generator of given draws."""

    def __init__(self, coin, lam, centre=(8, 8)):
        self.coin, self.lam, self.centre = coin, lam, np.array(centre)

    def random(self):
        return self.coin

    def beta(self, a, b):
        self.shape = a, b
        return self.lam

    def integers(self, high):
        return self.centre


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
@pytest.mark.parametrize("mixup, cutmix", [(0.8, 0), (0, 1.0), (0.8, 1.0)])
def test_targets_sum_to_one_and_are_the_shares_of_the_pixels(batch, mixup, cutmix):
    for seed in range(10):
        images, targets = numbered(batch)
        mixed, soft = mix(images, targets, mixup, cutmix, np.random.default_rng(seed))
        torch.testing.assert_close(soft.sum(1), torch.ones(batch))
        expected = soft @ torch.arange(batch).float()  # the mean pixel of an image that is so mixed
        torch.testing.assert_close(mixed.mean((1, 2, 3)), expected, atol=1e-4, rtol=1e-4)
        assert (soft > 0).sum(1).max() <= 2


def test_mixup_blends_neighbours_and_cutmix_pastes_a_box_of_them():
    images, targets = numbered(4)
    mixed, soft = mix(images, targets, 0.8, 1.0, rng := Fixed(coin=0.9, lam=0.7))  # mixup
    assert rng.shape == (0.8, 0.8)
    torch.testing.assert_close(mixed[:, 0, 0, 0], torch.tensor([0.3, 0.7, 2.3, 2.7]))
    torch.testing.assert_close(soft[1], torch.tensor([0.3, 0.7, 0, 0]))
    mixed, soft = mix(images, targets, 0.8, 1.0, rng := Fixed(coin=0.1, lam=0.75))  # a box of 8x8 in the middle
    assert rng.shape == (1.0, 1.0)
    assert (mixed[0, :, 4:12, 4:12] == 1).all() and mixed[0].sum() == 3 * 64
    torch.testing.assert_close(soft[0], torch.tensor([0.75, 0.25, 0, 0]))
    mixed, soft = mix(images, targets, 0.8, 1.0, Fixed(coin=0.1, lam=0.75, centre=(0, 0)))  # clipped to 4x4
    assert (mixed[0, :, :4, :4] == 1).all() and soft[0, 1] == 16 / 256


def test_without_mixing_a_batch_stays_as_it_is():
    images, targets = numbered(4)
    same, soft = mix(images, targets, 0, 0)
    assert same is images and soft is targets


def test_label_smoothing_spreads_its_share_over_all_classes():
    soft = train_imagenet.targets(torch.tensor([1]), 4, 0.1)
    torch.testing.assert_close(soft, torch.tensor([[0.025, 0.925, 0.025, 0.025]]))


# ---- erasing and dropping


def test_random_erasing_puts_noise_of_the_datas_mean_into_a_box_of_2_to_33_percent():
    torch.manual_seed(0)
    shares, noise = [], []
    for _ in range(100):
        image = torch.zeros(3, 64, 64, dtype=torch.uint8)
        changed = erased(image)
        rows, columns = (changed.amax(0).amax(axis).nonzero() for axis in (1, 0))
        box = changed[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        shares.append(box[0].numel() / 64**2)
        noise.append(box.flatten().float())
        assert not image.any()  # a copy
    assert 0.01 < min(shares) < 0.06 and 0.25 < max(shares) < 0.36 and 0.12 < sum(shares) / 100 < 0.23
    assert 105 < torch.cat(noise).mean() < 125 and 50 < torch.cat(noise).std() < 60  # 255 times 0.45 and 0.226


def test_training_boxes_have_8_to_100_percent_of_the_area_and_lie_inside():
    torch.manual_seed(0)
    boxes = [random_box(90, 120, 0.08, 1.0, 3 / 4) for _ in range(500)]
    shares = torch.tensor([height * width / (90 * 120) for _, _, height, width in filter(None, boxes)])
    assert 0.07 < shares.min() < 0.12 and shares.max() > 0.9 and 0.4 < shares.mean() < 0.6
    for top, left, height, width in filter(None, boxes):
        assert 0 <= top <= 90 - height and 0 <= left <= 120 - width and 0.7 < width / height < 1.4
    assert random_box(10, 1000, 0.08, 1.0, 3 / 4) is None  # no such box is in a strip
    assert middle_box(10, 1000, 3 / 4) == (0, 493, 10, 13) and middle_box(9, 12, 3 / 4) == (0, 0, 9, 12)


def test_drop_path_drops_whole_branches_of_an_image_and_keeps_their_mean():
    torch.manual_seed(0)
    block = Block(8, torch.nn.Identity(), drop_path=0.25)
    y = block.branch(torch.ones(4000, 2, 8))
    assert y.unique().tolist() == pytest.approx([0, 4 / 3])
    assert (y == y[:, :1, :1]).all() and abs(float(y.mean()) - 1) < 0.05
    assert torch.equal(block.eval().branch(torch.ones(4, 2, 8)), torch.ones(4, 2, 8))


def test_drop_path_grows_linearly_with_depth_and_draws_nothing_at_0():
    sizes = dict(image_size=8, patch_size=4, dim=8, heads=2, depth=3)
    rates = [block.drop_path for block in ViT(**sizes, drop_path=0.2).blocks]
    assert rates == pytest.approx([0, 0.1, 0.2])
    model = ViT(**sizes)
    before = torch.get_rng_state()
    model(torch.zeros(1, 3, 8, 8))
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(ValueError, match="drop_path is a probability below 1"):
        ViT(**sizes, drop_path=1.0)


def test_weights_alone_decay_as_in_deit():
    model = ViT(image_size=8, patch_size=4, dim=8, heads=2, depth=1, pool="cls", pos="learned")
    optimizer = train_imagenet.adamw(model, train_imagenet.Settings(weight_decay=0.05))
    decayed, others = ([id(p) for p in group["params"]] for group in optimizer.param_groups)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[p] for p in decayed} == {
        "patch_embed.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight", "blocks.0.mlp.0.weight",
        "blocks.0.mlp.2.weight", "head.weight",
    }  # fmt: skip
    assert len(decayed) + len(others) == len(names)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05, 0.0]
