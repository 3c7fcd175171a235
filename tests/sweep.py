"""Every attention layer that the libraries' models have, in small: is what `attention_layers` accepts right?

    python tests/sweep.py [timm | transformers | vit-pytorch | torchvision] [part of a name]

Builds models from configurations, without weights and without a network, and lets `verify` judge every layer that is
accepted with strict=False. A model is refused if strict=True raises, right if all its layers are, wrong if one layer
is, with strict=True or strict=False; not reached if we found no input that comes to all layers accepted. The last lines
are the table of docs/any-model.md. It wants timm, transformers, vit-pytorch and torchvision in an environment of their
own, and about an hour on one core.
"""

import contextlib
import copy
import importlib
import inspect
import io
import json
import logging
import os
import pkgutil
import re
import resource
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from layouts import attention_layers  # noqa: E402
from verify import verify  # noqa: E402
from writing import misfit  # noqa: E402

SECONDS, MEMORY = 120, 11 << 30  # for one model
LARGEST = 120e6  # parameters


def judge(model: nn.Module, passes: Iterable) -> tuple[str, str]:
    """Right, refused, wrong or not reached, and why.  passes: (prefix, module, arguments) that come to its layers, made
    as they are needed; the layers that none comes to are called alone."""
    views, outcome, why, wrong = attention_layers(model, strict=False), "right", "", []
    missed = {view.name: view for view in views if not misfit(view, qk=True, vp=True)}
    accepted = len(missed)
    try:
        outcome = "right" if attention_layers(model) else "without attention"
        if accepted < len(views):
            outcome, why = "refused", next(filter(None, (misfit(view, qk=True, vp=True) for view in views)))
    except ValueError as error:
        outcome, why = "refused", str(error)
    for prefix, module, args, kwargs in chain(passes, alone(model, missed)):
        if not missed:
            break
        for verdict in verify(module, *args, kwargs):
            name = f"{prefix}.{verdict.name}".strip(".")
            if verdict.right is not None and missed.pop(name, None) and not verdict.right:
                wrong.append(f"{name}: {verdict}")
    if wrong:
        return "wrong", f"{len(wrong)}: {wrong[0]} | strict: {outcome}"
    if missed and outcome == "right":
        return "not reached", f"{len(missed)} of {accepted}: {next(iter(missed))}"
    return outcome, f"layers: {accepted}, not reached {len(missed)}; {why[:150]}"


def alone(model: nn.Module, missed: dict) -> Iterator:
    """Calls of the layers themselves, without rotation. Cross-attention would not show here."""
    for name, view in list(missed.items()):
        layer = model.get_submodule(name)
        known = inspect.signature(layer.forward).parameters
        cos, sin = torch.ones(1, 1, view.W_Q.shape[2]), torch.zeros(1, 1, view.W_Q.shape[2])  # for any tokens
        extra = dict(position_embeddings=(cos, sin), cu_seqlens=torch.tensor([0, 7]), attention_mask=None)
        extra |= dict(max_seqlen=7, rotary_pos_emb=None, position_ids=torch.arange(7)[None])
        extra = {key: value for key, value in extra.items() if key in known}
        flat = {**extra, "position_embeddings": (cos[0], sin[0])} if "position_embeddings" in extra else extra
        x = torch.randn(1, 7, view.W_Q.shape[1])
        yield from working(
            layer, [([x], extra), ([x[0]], flat), ([x[0]], extra), ([x[:, None]] * 3, extra), ([x] * 3, extra)], name
        )


# ---- the libraries: name, how to build it, its passes


def timm_models() -> Iterator:
    """Of each of timm's model files and each set of layer classes in it, the variant with the fewest parameters."""
    import timm

    for module in timm.list_modules():
        smallest = {}
        for name in timm.list_models(module=module):
            if re.search("large|huge|giant|gigantic|enormous|_xl|so400m|so150m", name):
                continue
            try:
                with torch.device("meta"):
                    model = timm.create_model(name)
            except Exception:
                continue
            layers = [layer for layer in model.modules() if re.search("att|mhs?a", type(layer).__name__, re.I)]
            parts = {
                (type(layer).__name__, key.strip("0123456789."))
                for layer in layers
                for key, _ in layer.named_parameters()
            }
            size = sum(parameter.numel() for parameter in model.parameters())
            key = frozenset(parts)
            if layers and size < smallest.get(key, (LARGEST, ""))[0]:
                smallest[key] = size, name
        for _, name in smallest.values():

            def build(name=name):
                model = timm.create_model(name)
                shape = model.pretrained_cfg.get("input_size", (3, 224, 224))
                return model, [("", model, [torch.randn(1, *shape)], {})]

            yield name, build


def torchvision_models() -> Iterator:
    import torchvision.models as models

    for name in models.list_models():

        def build(name=name):
            model = models.get_model(name, weights=None)
            shape = (1, 3, 4, 64, 64) if "3d" in name else (1, 3, 16, 224, 224) if "mvit" in name else (1, 3, 224, 224)
            return model, [("", model, [torch.randn(shape)], {})]

        if re.search("vit|swin|maxvit", name):
            yield name, build


VIT_PYTORCH = dict(
    image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=4, mlp_dim=64, dim_head=8, channels=3,
    frames=4, image_patch_size=8, frame_patch_size=2, spatial_depth=1, temporal_depth=1, cls_depth=1, global_query_k=7,
    num_latents=4, num_register_tokens=2, window_size=2, input_fdim=32, max_seq_len=64, seq_len=64, levels=1,
    transformer_depth=1, num_memory_tokens_per_layer=2, patch_merge_num_tokens=4, patch_merge_layer=1, expert_dim=32,
    layer_dropout=0.0, volume_size=8, sm_dim=32, lg_dim=32, sm_patch_size=8, lg_patch_size=16,
    sm_enc_dim_head=8, lg_enc_dim_head=8, cross_attn_dim_head=8, sm_enc_heads=4, lg_enc_heads=4, cross_attn_heads=4,
)  # fmt: skip


def vit_pytorch_models() -> Iterator:
    """Every class whose arguments without a default we know a value for, with an image, video or sequence as input."""
    package = importlib.import_module("vit_pytorch")
    shapes = [(3, 32, 32), (3, 4, 32, 32), (3, 64), (4, 32), (64, 32), (32, 8, 8)]
    inputs = [*(torch.randn(1, *shape) for shape in shapes), [torch.randn(3, 32, 32)]]
    for info in pkgutil.iter_modules(package.__path__):
        try:
            module = importlib.import_module(f"vit_pytorch.{info.name}")
        except Exception:
            continue
        for name, kind in vars(module).items():
            if not (inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__):
                continue
            arguments = inspect.signature(kind.__init__).parameters
            needed = [a for a, p in arguments.items() if p.default is p.empty and p.kind in (1, 3) and a != "self"]
            if name in ("Transformer", "FeedForward") or not set(needed) <= set(VIT_PYTORCH) or not needed:
                continue

            def build(kind=kind, arguments=arguments):
                model = kind(**{a: value for a, value in VIT_PYTORCH.items() if a in arguments}).eval()
                return model, working(model, [([x], {}) for x in inputs])

            yield f"{info.name}.{name}", build


TINY = [  # names of a configuration's sizes, and what is small
    (r"(num_|n_)?(hidden_|encoder_|decoder_|attention_)?layers?|depth|num_blocks", 2),
    (r"(encoder_|decoder_|word_|embedding_|projection_)?(hidden_size|size|embed_dim|embed_proj_dim|dim)", 32),
    ("d_model|n_embd|hidden_dim|emb_dim|d_embed|output_dim", 32),
    (r"(num_|n_)?(encoder_|decoder_)?(num_)?(key_value_|attention_)?heads?", 4),
    ("head_dim|attention_head_size|d_kv|d_head|qk_nope_head_dim|qk_rope_head_dim|v_head_dim", 8),
    (".*intermediate_size|.*ffn_dim|d_ff|n_inner|mlp_dim", 64),
    ("vocab_size", 1000),
    ("num_(local_)?experts|n_routed_experts|rotary_dim|prediction_length", 4),
    ("quantization_dim", 64),
]


def shrink(config, rules=TINY, fill=False):
    """Make sizes small; with `fill`, those that are None as well."""
    for name in list(vars(config)):
        value = getattr(config, name, None)
        if hasattr(value, "to_dict"):
            shrink(value, rules, fill)
        for pattern, small in rules:
            if (type(value) is int or value is None and fill) and re.fullmatch(pattern, name):
                with contextlib.suppress(Exception):
                    setattr(config, name, small)
    if type(getattr(config, "pad_token_id", None)) is int and config.pad_token_id >= 1000:
        config.pad_token_id = 0
    if isinstance(vars(config).get("layer_types"), list):
        config.layer_types = config.layer_types[:2]
    return config


def find_size(config) -> int:
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
        size = getattr(part, "image_size", None)
        if size is not None:
            return size if isinstance(size, int) else size[0]
    return 224


def hugging_face_inputs(model: nn.Module) -> list:
    """What the model's forward may want, its main input first."""
    config, known = model.config, inspect.signature(model.forward).parameters
    mels, length = getattr(config, "num_mel_bins", 80), getattr(config, "max_source_positions", 50)
    mels, length = (mels if type(mels) is int else 80), (length if type(length) is int else 50)
    ids = torch.arange(5, 12)[None]
    text = [dict(input_ids=ids, decoder_input_ids=ids), dict(input_ids=ids)]
    text += [dict(input_ids=ids, bbox=torch.zeros(1, 7, 4, dtype=torch.long))]
    candidates = list(text)
    for size in dict.fromkeys((find_size(config), 224)):
        image = dict(pixel_values=torch.randn(1, 3, size, size))
        candidates += [image, *({**image, **words} for words in text)]
        for frames in (4, 16):
            video = torch.randn(1, frames, 3, size, size)
            candidates += [dict(pixel_values=video), dict(pixel_values_videos=video)]
    for shape in [(1, mels, 2 * length), (1, 60, mels), (1, 60, 160)]:
        sound = dict(input_features=torch.randn(shape))
        candidates += [sound, dict(sound, decoder_input_ids=ids)]
    candidates += [dict(input_values=torch.randn(shape)) for shape in [(1, 4000), (1, 1, 4000), (1, 1024, 128)]]
    candidates += [dict(input_values=torch.randn(1, 60, 80), decoder_input_values=torch.randn(1, 20, 80))]
    candidates += [dict(inputs_embeds=torch.randn(1, 7, 32)), dict(hidden_states=torch.randn(1, 7, 32))]
    candidates += [dict(past_values=torch.randn(shape)) for shape in [(1, 96, 1), (1, 512, 7)]]
    main = getattr(model, "main_input_name", "input_ids")
    candidates = [arguments for arguments in candidates if set(arguments) <= set(known)]
    return [([], arguments) for arguments in sorted(candidates, key=lambda arguments: main not in arguments)]


def working(model: nn.Module, candidates: list, prefix: str = "") -> list:
    """The first arguments that the model runs with, and so for the models in it until one does."""
    for args, kwargs in candidates:
        try:
            with torch.no_grad():
                model(*args, **copy.deepcopy(kwargs))
            return [(prefix, model, args, kwargs)]
        except Exception:
            continue
    return []


def transformers_models() -> Iterator:
    """Every type that AutoModel knows: all sizes small, or the number of layers alone."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    transformers.logging.set_verbosity_error()
    for config_class in MODEL_MAPPING:

        def passes(model):
            yield from working(model, hugging_face_inputs(model))
            for name, child in model.named_modules():
                if name and isinstance(child, transformers.PreTrainedModel):
                    yield from working(child, hugging_face_inputs(child), name)

        def build(config_class=config_class):
            reasons = []
            for rules, fill in ((TINY, False), (TINY, True), (TINY[:1], False)):
                try:
                    kind = MODEL_MAPPING[config_class]
                    kind = kind[0] if isinstance(kind, tuple) else kind
                    config = shrink(config_class(), rules, fill)
                    with torch.device("meta"):
                        model = kind(copy.deepcopy(config))
                    if not attention_layers(model, strict=False):
                        return model, []
                    if sum(p.numel() for p in model.parameters()) > LARGEST:
                        raise RuntimeError("too large")
                    model = kind(config).float().eval()
                    return model, passes(model)
                except Exception as error:
                    reasons.append(repr(error))
            raise RuntimeError(f"no small configuration builds: {reasons}")

        yield config_class.__name__.removesuffix("Config"), build


def in_a_process(build) -> tuple[str, str]:
    """`judge` of what `build` makes, in a process of its own: a model may take too much time or memory, or crash."""
    read, write = os.pipe()
    if not (child := os.fork()):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        signal.alarm(5 * SECONDS)  # if it waits for something
        torch.manual_seed(0)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                model, passes = build()
                found = judge(model.eval(), passes)
        except BaseException as error:
            found = "not built", f"{type(error).__name__}: {error}"
        with open(write, "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.close(write)
    with open(read) as file:
        found = file.read()
    status = os.waitpid(child, 0)[1]
    return tuple(json.loads(found)) if found else ("not built", f"ended by signal {os.WTERMSIG(status)}")


LIBRARIES = {
    "torchvision": torchvision_models,
    "vit-pytorch": vit_pytorch_models,
    "timm": timm_models,
    "transformers": transformers_models,
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # a process that has computed with more of them cannot fork
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    part = sys.argv[2] if len(sys.argv) > 2 else ""

    table = {}
    for library, models in LIBRARIES.items():
        if wanted not in ("", library):
            continue
        counts = table[library] = Counter()
        for name, build in models():
            if not re.search(part, name):
                continue
            outcome, why = in_a_process(build)
            counts[outcome] += 1
            print(f"{library}\t{name}\t{outcome}\t{' '.join(why.split())[:400]}", flush=True)
    outcomes = ["right", "refused", "wrong", "not reached", "without attention", "not built"]
    print(f"\n| library | version | {' | '.join(outcomes)} |\n|{'---|' * (len(outcomes) + 2)}")
    for library, counts in table.items():
        print(f"| {library} | {version(library)} | {' | '.join(str(counts[outcome]) for outcome in outcomes)} |")


if __name__ == "__main__":
    main()
