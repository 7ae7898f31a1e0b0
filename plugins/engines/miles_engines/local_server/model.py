"""Loading the model, and one forward step over rows of different lengths."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from miles_engines.local_server import attention
from miles_engines.local_server.kv import KVRows
from miles_engines.local_server.settings import ServingError, Settings

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers whose state is keys and values by position, which is what `kv` and the prefix cache keep."""


DTYPE_ARGUMENT = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
"""What `from_pretrained` calls it; the old name may go when transformers 4 does."""


SMALL = 30_000_000
"""Parameters below which one thread is quicker than several, and leaves the other cores to the requests."""


class ModelError(ServingError):
    """The model cannot be served; the text says why and what to do."""


@dataclass(frozen=True)
class Work:
    """What one row contributes to a step: the tokens at positions `start …` of its sequence; may be none."""

    start: int
    tokens: Sequence[int]


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint, on the CPU."""

    path: Path
    tensors: Mapping[str, torch.Tensor]


class Model:
    """A causal language model, and the facts about it that requests are checked against."""

    def __init__(self, network: Any, device: torch.device, settings: Settings) -> None:
        self._network = network
        self.device = device
        self.path = settings.model
        """Where the weights came from."""
        config = network.config.get_text_config()
        self.architectures = list(network.config.architectures or [type(network).__name__])
        self.model_type = str(network.config.model_type)
        self.vocab_size = int(config.vocab_size)
        self.context_length = settings.context_length or int(config.max_position_embeddings)
        self._window: int | None = getattr(config, "sliding_window", None)
        # eager attention adds its mask to the scores; the others take a boolean one
        self._additive = network.config._attn_implementation == "eager"
        self._layer_types = tuple(getattr(config, "layer_types", None) or ())
        self.generation_defaults, self.eos_ids = _generation_config(settings.model, config)

    def use(self, weights: Weights) -> None:
        """Take over weights that fit; called between two steps."""
        with torch.inference_mode():
            for name, tensor in self._network.state_dict().items():
                tensor.copy_(weights.tensors[name])
        self.path = weights.path

    def fits(self, weights: Weights) -> None:
        """Raise ModelError, naming a tensor, if the weights are those of another architecture."""
        own = {name: tuple(tensor.shape) for name, tensor in self._network.state_dict().items()}
        given = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
        for name in sorted(own.keys() | given.keys()):
            if own.get(name) != given.get(name):
                raise ModelError(
                    f"{name} has shape {given.get(name, 'none')} in {weights.path} and {own.get(name, 'none')} in the "
                    "model that is served: a weight update takes a checkpoint of the same architecture"
                )

    def step(self, kv: KVRows, work: Sequence[Work]) -> torch.Tensor:
        """Run new tokens through the model, item `i` in row `i`; float32 logits after each row's last one.

        Rows shorter than the longest are filled up on the left, so that every last token is in the last
        column. Filling is never stored and nothing attends to it.
        """
        with torch.inference_mode():
            return self._step(kv, work)

    def _step(self, kv: KVRows, work: Sequence[Work]) -> torch.Tensor:
        columns = max(len(item.tokens) for item in work)
        ids = torch.tensor([[0] * (columns - len(w.tokens)) + list(w.tokens) for w in work], device=self.device)
        ends = torch.tensor([w.start + len(w.tokens) for w in work], device=self.device)
        positions = ends[:, None] - columns + torch.arange(columns, device=self.device)
        starts = torch.tensor([w.start for w in work], device=self.device)
        width = max(w.start + len(w.tokens) for w in work)
        self._aim(kv, work, positions, starts, width)
        positions = positions.clamp_min(0)
        output = self._network(
            input_ids=ids,
            attention_mask=self._mask(positions, width),
            position_ids=positions,
            past_key_values=kv,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _aim(self, kv: KVRows, work: Sequence[Work], positions: torch.Tensor, starts: torch.Tensor, width: int) -> None:
        kv.reserve(len(work), width)
        if all(len(w.tokens) == 1 for w in work):
            rows = torch.arange(len(work), device=self.device)
            kv.aim((rows, positions[:, 0]), None, len(work), width)
            return
        source = (positions >= starts[:, None]).nonzero(as_tuple=True)
        kv.aim((source[0], positions[source]), source, len(work), width)

    def _mask(self, positions: torch.Tensor, width: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Which stored positions each new token may attend to, for each kind of layer the model has."""
        keys = torch.arange(width, device=self.device)
        full = (keys <= positions[:, :, None])[:, None]
        if self._window is None:
            return self._form(full)
        near = full & (keys > positions[:, :, None] - self._window)[:, None]
        if not self._layer_types:
            return self._form(near)
        return {"full_attention": self._form(full), "sliding_attention": self._form(near)}

    def _form(self, mask: torch.Tensor) -> torch.Tensor:
        if not self._additive:
            return mask
        dtype = self._network.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def load(settings: Settings, progress: Callable[[str], None]) -> Model:
    """Read the model from disk; ModelError if it is of a kind that this engine cannot serve."""
    device = _device(settings.device)
    progress(f"loading {settings.model} on {device}")
    started = time.monotonic()
    network = _network(settings, device)
    network.eval().requires_grad_(False).to(device)
    count = sum(parameter.numel() for parameter in network.parameters())
    if settings.threads or count < SMALL:
        torch.set_num_threads(settings.threads or 1)
    progress(f"loaded {count / 1e6:.1f} M parameters in {time.monotonic() - started:.1f} s")
    return Model(network, device, settings)


def read_weights(settings: Settings, path: Path) -> Weights:
    """The weights of another checkpoint of the model. Raises ModelError."""
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is no directory with a config.json and weights")
    try:
        network = _network(replace(settings, model=path), torch.device("cpu"))
    except ModelError:
        raise
    except Exception as error:  # whatever transformers and safetensors make of damaged files
        raise ModelError(f"{path} could not be read: {type(error).__name__}: {error}") from error
    return Weights(path, network.state_dict())


def _network(settings: Settings, device: torch.device) -> Any:
    config = transformers.AutoConfig.from_pretrained(settings.model)
    _check_layers(config)
    dtype = {DTYPE_ARGUMENT: _dtype(settings.dtype, device, config)}
    read = _read_whole
    # transformers' sdpa leaves soft-capped scores uncapped
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return read(settings.model, config=config, attn_implementation="eager", **dtype)
    try:
        network = read(settings.model, config=config, attn_implementation="sdpa", **dtype)
    except ValueError as error:  # some models, e.g. those with attention sinks, have the eager form alone
        if "attention" not in str(error).lower():
            raise
        return read(settings.model, config=config, attn_implementation="eager", **dtype)
    attention.install(network)
    return network


def _read_whole(path: Path, **options: Any) -> Any:
    """`from_pretrained` that fails where it would make weights up."""
    network, found = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    missing = sorted(found["missing_keys"])
    if missing:
        raise ModelError(f"{path} lacks {len(missing)} of the model's weights, {missing[0]} among them")
    return network


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"--device {name}: torch {torch.__version__} has no such device ({error})") from error
    return device


def _dtype(name: str, device: torch.device, config: Any) -> torch.dtype:
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    # half precision is slow on most CPUs, and float32 is what log-probs are compared in
    declared = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return declared if device.type != "cpu" and isinstance(declared, torch.dtype) else torch.float32


def _check_layers(config: Any) -> None:
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    recurrent = [name for name in ("ssm_state_size", "mamba_num_heads", "linear_attn_config") if hasattr(text, name)]
    if kinds - LAYER_TYPES or recurrent:
        what = ", ".join(sorted(kinds - LAYER_TYPES) or recurrent)
        raise ModelError(
            f"the model ({config.model_type}) has layers that the local engine cannot batch or cache: {what}; "
            "it serves attention-only models. Use --engine sglang for this one"
        )


def _generation_config(model: Path, config: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Sampling defaults and end-of-sequence ids: generation_config.json's, else the ids of config.json."""
    path = model / "generation_config.json"
    stored: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    eos = stored.get("eos_token_id", getattr(config, "eos_token_id", None))
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    defaults = {name: stored[name] for name in names if stored.get(name) is not None}
    if defaults.get("top_k") == 0:  # transformers' way of saying: no limit
        del defaults["top_k"]
    return defaults, tuple(ids)
