"""Facts about text.py: what becomes a token, where the vocabulary comes from, and that every target counts once."""

import io
import math
import os
import urllib.error
import urllib.request
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from inputs import text
from inputs.windows import IGNORED, epoch_starts, eval_windows, windows
from lm import TransformerLM
from official_formats import write_ptb

PTB = os.environ.get("PTB_DIR") or os.path.join("data", "ptb")  # the folder with the three files
needs_ptb = pytest.mark.skipif(
    not all(os.path.isfile(os.path.join(PTB, file)) for file in text.PTB_FILES),
    reason=f"needs {', '.join(text.PTB_FILES)} in {PTB} (or in the folder that PTB_DIR names)",
)

TRAIN = " the cat <unk> on N mats \n the dog sat \n the the cat sat on N \n"
VALID = " a cat sat \n the dog \n"
TEST = " the mats sat on the dog \n"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def offline(url, **_):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", offline)


@pytest.fixture(scope="module")
def pydoc():
    return text.load_text("pydoc")


@pytest.fixture
def small_ptb(tmp_path, monkeypatch):
    """Three small files in tmp_path/ptb that pass for the official ones."""
    write_ptb(tmp_path, monkeypatch, TRAIN, VALID, TEST)
    return tmp_path


def write_wikitext(data_dir, train=TRAIN, valid=VALID, test=TEST):
    folder = data_dir / "wikitext-103"
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in zip(text.WIKITEXT_FILES, (train, valid, test), strict=True):
        (folder / file).write_text(content, encoding="utf-8")
    return folder


def one_sentence(error, *parts):
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


def words(data, part):
    return [data.vocabulary[token] for token in getattr(data, part).tolist()]


# ---- names


def test_an_unknown_name_is_answered_with_the_names_and_the_nearest():
    for call in (text.load_text, text.is_available):
        with pytest.raises(ValueError, match="did you mean ptb-char") as error:
            call("ptb-chars")
        one_sentence(error, *text.DATASETS)


# ---- Penn Treebank


def test_ptb_characters_are_the_lines_without_outer_spaces_and_with_their_ends(small_ptb):
    data = text.load_text("ptb-char", small_ptb, download=False)
    assert text.decode(data.test, data.vocabulary, "char") == "the mats sat on the dog\n"
    assert text.decode(data.train, data.vocabulary, "char").startswith("the cat <unk> on N mats\nthe dog")
    assert data.vocabulary == tuple(sorted(set(TRAIN))) and data.unit == "char" and data.name == "ptb-char"


def test_ptb_words_end_each_line_with_eos_and_come_most_frequent_first(small_ptb):
    data = text.load_text("ptb-word", small_ptb, download=False)
    assert words(data, "train") == TRAIN.replace("\n", "<eos>").split()
    assert data.vocabulary[:2] == ("the", "<eos>") and data.unit == "word"
    counts = Counter(words(data, "train"))
    assert [counts[word] for word in data.vocabulary] == sorted(counts.values(), reverse=True)
    assert words(data, "valid") == "<unk> cat sat <eos> the dog <eos>".split()  # train has no "a"
    assert text.decode(data.test, data.vocabulary, "word") == "the mats sat on the dog\n"
    assert all(part.dtype == torch.int32 and part.ndim == 1 for part in (data.train, data.valid, data.test))


@needs_ptb
def test_the_real_penn_treebank_has_its_known_sizes(tmp_path):
    (tmp_path / "ptb").symlink_to(os.path.abspath(PTB))
    for name, sizes, types in [
        ("ptb-char", (5_017_482, 393_042, 442_423), 50),
        ("ptb-word", (929_589, 73_760, 82_430), 10_000),
    ]:
        data = text.load_text(name, tmp_path, download=False)
        assert (len(data.train), len(data.valid), len(data.test)) == sizes and len(data.vocabulary) == types
        assert data.train.unique().tolist() == list(range(types))


def test_files_that_are_not_the_official_ones_are_refused_each_time(small_ptb):
    text.load_text("ptb-word", small_ptb)
    (small_ptb / "ptb" / "ptb.valid.txt").write_text(VALID + " ")
    for name in ("ptb-char", "ptb-word"):
        with pytest.raises(ValueError) as error:
            text.load_text(name, small_ptb)
        one_sentence(error, "ptb.valid.txt is not the official file", "delete", small_ptb / "ptb")


def test_without_files_and_network_one_sentence_says_what_to_put_where(tmp_path):
    for download in (True, False):
        with pytest.raises(FileNotFoundError) as error:
            text.load_text("ptb-char", tmp_path / "data", download)
        one_sentence(error, *text.PTB_FILES, tmp_path / "data" / "ptb", text.PTB_URL, "pydoc")
    assert not (tmp_path / "data").exists()


def test_missing_files_are_fetched_checked_and_kept(small_ptb, monkeypatch, tmp_path, capsys):
    served, asked = {file: (small_ptb / "ptb" / file).read_bytes() for file in text.PTB_FILES}, []

    class Response(io.BytesIO):
        headers = {}

    def urlopen(url, timeout):
        asked.append(url)
        return Response(served[url.removeprefix(text.PTB_URL)])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    fresh = tmp_path / "fresh"
    text.load_text("ptb-word", fresh)
    assert asked == [text.PTB_URL + file for file in text.PTB_FILES]
    assert sorted(path.name for path in (fresh / "ptb").iterdir()) == sorted(text.PTB_FILES)
    text.load_text("ptb-char", fresh)
    assert len(asked) == 3 and "downloading ptb.train.txt" in capsys.readouterr().err
    served["ptb.test.txt"] = b"<html>sign in</html>"
    (fresh / "ptb" / "ptb.test.txt").unlink()
    with pytest.raises(ValueError, match="not the official file"):
        text.load_text("ptb-char", fresh)
    assert len(list((fresh / "ptb").iterdir())) == 2


def test_availability_follows_the_files(small_ptb):
    assert text.is_available("ptb-char", small_ptb) and text.is_available("ptb-word", str(small_ptb))
    (small_ptb / "ptb" / "ptb.test.txt").unlink()
    assert not text.is_available("ptb-word", small_ptb) and text.is_available("pydoc", small_ptb / "absent")
    assert not text.is_available("wikitext-103", small_ptb)
    write_wikitext(small_ptb)
    assert text.is_available("wikitext-103", small_ptb)


# ---- WikiText-103


def test_wikitext_is_words_with_eos_for_empty_lines_too_whatever_the_chunks(tmp_path, monkeypatch):
    write_wikitext(tmp_path, train=" \n = Señor = \n \n" + TRAIN)
    whole, lines = text.load_text("wikitext-103", tmp_path), text.lines
    assert words(whole, "train")[:6] == ["<eos>", "=", "Señor", "=", "<eos>", "<eos>"]
    assert words(whole, "valid") == "<unk> cat sat <eos> the dog <eos>".split()
    assert whole.unit == "word" and whole.train.dtype == torch.int32
    monkeypatch.setattr(text, "lines", lambda path: lines(path, 1))  # a line at a time
    os.utime(tmp_path / "wikitext-103" / "wiki.test.tokens")
    by_line = text.load_text("wikitext-103", tmp_path)
    assert by_line.vocabulary == whole.vocabulary
    for a, b in zip(by_line[1:4], whole[1:4], strict=True):
        assert torch.equal(a, b)


def test_a_text_of_any_size_is_read_in_pieces_of_a_few_megabytes(tmp_path):
    (tmp_path / "long").write_text(200 * (50_000 * "x" + "\n"))
    sizes = list(map(len, text.lines(tmp_path / "long")))
    assert sum(sizes) == 200 * 50_001 and max(sizes) < 5_000_000


def test_encoded_wikitext_is_kept_mapped_and_made_anew_when_a_file_changes(tmp_path, monkeypatch):
    folder = write_wikitext(tmp_path)
    first = text.load_text("wikitext-103", tmp_path)
    files = {*text.WIKITEXT_FILES, *(file + ".npy" for file in text.WIKITEXT_FILES), "vocabulary.json"}
    assert {path.name for path in folder.iterdir()} == files
    with monkeypatch.context() as patch:
        patch.setattr(text, "lines", lambda path: pytest.fail("read again"))
        again = text.load_text("wikitext-103", tmp_path)
    assert torch.equal(again.train, first.train) and again.vocabulary == first.vocabulary
    tokens = first.train.tolist()
    first.train[0] += 1  # in this process's memory, not in the file
    assert np.load(folder / "wiki.train.tokens.npy").tolist() == tokens
    write_wikitext(tmp_path, train=TRAIN + " a \n")
    assert "a" in text.load_text("wikitext-103", tmp_path).vocabulary
    (folder / "wiki.valid.tokens.npy").unlink()
    assert words(text.load_text("wikitext-103", tmp_path), "valid")[0] == "a"


def test_an_interrupted_encoding_is_begun_anew(tmp_path, monkeypatch):
    folder, word_tokens = write_wikitext(tmp_path), text.word_tokens

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(text, "word_tokens", interrupt)
    with pytest.raises(KeyboardInterrupt):
        text.load_text("wikitext-103", tmp_path)
    assert {path.name for path in folder.iterdir()} == set(text.WIKITEXT_FILES)
    monkeypatch.setattr(text, "word_tokens", word_tokens)
    assert len(text.load_text("wikitext-103", tmp_path).test) == 7


def test_missing_and_unfit_wikitext_is_told_in_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        text.load_text("wikitext-103", tmp_path)
    one_sentence(error, *text.WIKITEXT_FILES, tmp_path / "wikitext-103", "wikitext-103-v1.zip", "pydoc")
    folder = write_wikitext(tmp_path, train="the cat\n", valid="the dog\n")
    with pytest.raises(ValueError) as error:
        text.load_text("wikitext-103", tmp_path)
    one_sentence(error, "'dog'", folder / "wiki.train.tokens")
    write_wikitext(tmp_path, test="")
    with pytest.raises(ValueError) as error:
        text.load_text("wikitext-103", tmp_path)
    one_sentence(error, folder / "wiki.test.tokens", "fewer than two tokens")


# ---- pydoc


def test_pydoc_is_ascii_prose_of_300_000_characters_in_shares_of_90_5_5(pydoc):
    sizes = [len(pydoc.train), len(pydoc.valid), len(pydoc.test)]
    assert sum(sizes) > 300_000
    for size, share in zip(sizes, (0.9, 0.05, 0.05), strict=True):
        assert abs(size / sum(sizes) - share) < 0.005
    assert set(pydoc.vocabulary) <= {"\n", *map(chr, range(32, 127))} and pydoc.unit == "char"
    train = text.decode(pydoc.train, pydoc.vocabulary, "char")
    assert "iterable" in train and train.count("?") < train.count("!") + train.count("=")


def test_pydoc_parts_share_almost_no_line_and_loading_is_repeatable(pydoc):
    parts = [text.decode(part, pydoc.vocabulary, "char") for part in (pydoc.train, pydoc.valid, pydoc.test)]
    lines = [[" ".join(line.split()) for line in part.split("\n") if len(line.split()) > 3] for part in parts]
    for held_out in lines[1:]:
        assert sum(line in set(lines[0]) for line in held_out) < 0.1 * len(held_out)
    again = text.load_text("pydoc", "nowhere", download=False)
    assert torch.equal(again.train, pydoc.train) and torch.equal(again.test, pydoc.test)


# ---- one's own files


def test_own_characters_are_all_kept_and_cut_by_position(tmp_path):
    content = "äb\tc\n" * 20
    (tmp_path / "a.txt").write_text("\ufeff" + content[:50], encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(content[50:-1].replace("\n", "\r\n").encode())  # its last line does not end
    data = text.load_files([tmp_path / "a.txt", str(tmp_path / "b.txt")])
    assert [len(data.train), len(data.valid), len(data.test)] == [90, 5, 5]
    assert "".join(text.decode(part, data.vocabulary, "char") for part in data[1:4]) == content
    assert data.vocabulary == ("\t", "\n", "b", "c", "ä")


def test_own_words_that_train_has_once_become_unk_and_so_do_those_it_lacks(tmp_path):
    (tmp_path / "a.txt").write_text("rare " + "x y\n" * 30 + "new y\n")
    data = text.load_files([tmp_path / "a.txt"], unit="word")
    assert set(data.vocabulary) == {"x", "y", "<eos>", "<unk>"}
    assert words(data, "train")[0] == "<unk>" and words(data, "test")[-3:] == ["<unk>", "y", "<eos>"]
    assert len(data.train) == 94 - 2 * 4 and len(data.valid) == len(data.test) == 4
    assert text.load_files([tmp_path / "a.txt"], unit="word", min_count=100).vocabulary == ("<unk>",)


@pytest.mark.parametrize(
    "unit, content, symbol", [("char", "ab" * 40 + "é", "'é'"), ("word", "a b " * 40 + "c", "'c'")]
)
def test_a_symbol_that_train_lacks_is_named(tmp_path, unit, content, symbol):
    (tmp_path / "a.txt").write_text(content + "\n" * (unit == "char"), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        text.load_files([tmp_path / "a.txt"], unit, min_count=1)
    one_sentence(error, "does not occur in the training part")
    assert symbol in str(error.value)


def test_text_that_is_not_utf8_or_too_short_is_named(tmp_path):
    file = tmp_path / "latin.txt"
    for content, sentence in [
        ("café\n".encode("latin-1") * 100, "is not UTF-8"),
        (b"\xff\xfea\x00" * 50, "is not UTF-8"),
        (b"", "0 tokens are too few"),
        (b"a" * 38, "38 tokens are too few"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ValueError) as error:
            text.load_files([file])
        one_sentence(error, file, sentence)
    with pytest.raises(OSError, match=r"absent\.txt"):
        text.load_files([tmp_path / "absent.txt"])
    with pytest.raises(ValueError, match="'char' or 'word'"):
        text.load_files([file], unit="byte")


def test_text_and_tokens_go_back_and_forth():
    vocabulary = ("<eos>", "b", "a")
    prompt = text.encode("a b\n\nb", vocabulary, "word")
    assert prompt.tolist() == [2, 1, 0, 0, 1] and text.decode(prompt, vocabulary, "word") == "a b\n\nb"
    assert text.decode(torch.tensor([0, 2]), vocabulary, "word") == "\na"
    assert text.encode("ba", ("a", "b"), "char").tolist() == [1, 0] and len(text.encode("", ("a",), "char")) == 0
    for unit in ("char", "word"):
        with pytest.raises(ValueError, match="'z'"):
            text.encode("z", ("a", "b"), unit)
    assert text.encode("z a", ("<unk>", "a"), "word").tolist() == [0, 1]


# ---- windows


@pytest.mark.parametrize("length, context", [(2, 1), (9, 8), (16, 8), (17, 8), (100, 8), (101, 7), (64, 1)])
def test_an_epoch_has_each_target_at_most_once_in_as_many_windows_whatever_the_offset(length, context):
    tokens, counts, covered = torch.arange(length), set(), set()
    for seed in range(60):
        starts = epoch_starts(length, context, torch.Generator().manual_seed(seed))
        inputs, targets = windows(tokens, starts, context)
        assert inputs.shape == targets.shape == (len(starts), context) and inputs.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)  # the stream counts upwards
        assert len(targets.unique()) == targets.numel() > length - 1 - 2 * context
        counts.add(len(starts))
        covered |= set(targets.flatten().tolist())
    assert len(counts) == 1 and covered == set(range(1, length))


def test_an_epoch_is_shuffled_and_repeated_by_its_generator():
    starts = [epoch_starts(1000, 10, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0].sort().values, starts[2].sort().values)
    assert not torch.equal(starts[0], starts[0].sort().values)


def test_a_stream_shorter_than_a_window_is_refused():
    for length, context in [(8, 8), (1, 1), (5, 0)]:
        with pytest.raises(ValueError, match="too few for a window"):
            epoch_starts(length, context)


@pytest.mark.parametrize("length", [2, 5, 8, 9, 10, 11, 12, 40, 41])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_evaluation_counts_each_target_once_with_enough_before_it(length, stride):
    tokens, context, seen = torch.arange(length).int(), 8, []
    for inputs, targets in eval_windows(tokens, context, stride, batch_size=3):
        assert inputs.shape == targets.shape and inputs.shape[1] == context and inputs.dtype == torch.int64
        for row_in, row_out in zip(inputs, targets, strict=True):
            for place in (row_out != IGNORED).nonzero().flatten().tolist():
                target = int(row_out[place])
                earlier = row_in[: place + 1].tolist()
                assert earlier == list(range(target - len(earlier), target))
                assert len(earlier) >= min(target, context - stride)
                seen.append(target)
    assert seen == list(range(1, length))


@pytest.mark.parametrize("stride", [2, 5, 8])
def test_evaluation_gives_the_same_sum_for_every_batch_size_and_that_of_a_naive_loop(stride):
    torch.manual_seed(0)
    model = TransformerLM(11, context=8, dim=24, depth=2, heads=3).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        tokens, naive = torch.randint(11, (60,), dtype=torch.int32), 0.0
        for target in range(1, 60):  # one at a time, from the window that counts it
            start = max(0, math.ceil((target - 8) / stride)) * stride
            logits = model(tokens[None, start:target].long())[0, -1]
            naive += F.cross_entropy(logits, tokens[target].long())
        for batch_size in (1, 2, 7, 100):
            total, count = 0.0, 0
            for inputs, targets in eval_windows(tokens, 8, stride, batch_size):
                total += model.loss(inputs, targets, chunk=5, reduction="sum")
                count += int((targets != IGNORED).sum())
            torch.testing.assert_close(total, naive, atol=1e-9, rtol=1e-12)
            assert count == 59


def test_evaluation_arguments_that_do_not_fit_are_refused_at_once():
    for length, stride in [(20, 0), (20, 9), (1, 8), (0, 8)]:
        with pytest.raises(ValueError, match="a stride lies between|too few"):
            eval_windows(torch.arange(length), 8, stride)
