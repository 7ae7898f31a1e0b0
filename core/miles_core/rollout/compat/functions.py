"""Functions of miles that modules written for it call, done with ours."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from miles_core.errors import ConfigError
from miles_core.rollout import generation, http
from miles_core.rollout.compat import current
from miles_core.rollout.state import RolloutState
from miles_core.types import GenerateFnInput, Sample, SampleStatus, Tool


async def post(
    url: str, payload: Any, max_retries: int = 60, action: str = "post", headers: Mapping[str, str] | None = None
) -> Any:
    """Send JSON and return the decoded answer; transport errors and 5xx are tried again."""
    return await http.post(url, payload, max_retries, action, headers, http=current.shared_client())


async def get(url: str) -> Any:
    """The decoded JSON answer of a GET request."""
    return await http.get(url, http=current.shared_client())


def load_function(path: str) -> Any:
    """What a dotted path names. Raises ConfigError naming the path."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path!r} cannot be loaded: {error}; give package.module.name") from error


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """The checkpoint's tokenizer, as transformers has it."""
    return _transformers().AutoTokenizer.from_pretrained(name_or_path, **kwargs)


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """The checkpoint's processor, or None where it has none."""
    try:
        return _transformers().AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError):
        return None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("this module needs transformers: pip install 'miles-plugins[local]'") from error
    return transformers


class GenerateState:
    """`GenerateState(args)` is the state of the run whose settings `args` are."""

    def __new__(cls, args: Any) -> RolloutState:  # type: ignore[misc]  # as miles' singleton, it is asked for by args
        """The run's state, the same one each time."""
        return current.state_of(args)


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The older form of the generate function of one answer."""
    from miles_core.rollout.loader import load_generate_function

    output = await load_generate_function("single_turn")(
        GenerateFnInput(current.state_of(args), sample, sampling_params)
    )
    return output.as_list()[0]


# -- the helpers of generate functions that call `/generate` themselves ---------------------------------------


def compute_prompt_ids_from_sample(state: Any, sample: Sample, tools: Sequence[Tool] | None = None) -> list[int]:
    """The ids of the sample's prompt, as the run's family renders it."""
    return generation.prompt_ids(state, sample, tools)


def compute_request_payload(
    args: Any,
    input_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    multimodal_inputs: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any] | None, SampleStatus | None]:
    """The body of a `/generate` request, capped by the context; None and `truncated` where nothing fits."""
    params = generation.capped(args, len(input_ids), sampling_params)
    if params is None:
        return None, SampleStatus.TRUNCATED
    payload = {
        "input_ids": list(input_ids),
        "sampling_params": params,
        "return_logprob": True,
        **generation.replay_fields(args),
    }
    if images := (multimodal_inputs or {}).get("images"):
        payload["image_data"] = [_as_data_url(image) for image in images]
    return payload, None


def _as_data_url(image: Any) -> Any:
    """An image of Pillow as a data URL; a URL, path or encoded text as it is."""
    if not hasattr(image, "save"):
        return image
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


async def update_sample_from_response(
    args: Any, sample: Sample, payload: Mapping[str, Any], output: Any, update_loss_mask: bool = False
) -> None:
    """Lay a reply of `/generate` over the sample: tokens, text, log-probabilities, status, counters.

    Raises ValueError where the request did not go on from the sample's own tokens.
    """
    reply = generation.read_reply(output)
    if not sample.tokens:
        sample.tokens = list(payload["input_ids"])
    elif "input_ids" in payload and list(payload["input_ids"]) != list(sample.tokens):
        raise ValueError(
            f"sample {sample.index} has {len(sample.tokens)} tokens, and the request did not go on from them: send "
            "sample.tokens as input_ids, or begin the sample anew"
        )
    mask, log_probs, text = sample.loss_mask, sample.rollout_log_probs or [], sample.response
    sample.rollout_log_probs = [*log_probs, *reply.log_probs]
    sample.tokens = [*sample.tokens, *reply.ids]
    sample.response, sample.response_length = text + reply.text, sample.response_length + len(reply.ids)
    if update_loss_mask:
        sample.loss_mask = [*(mask or ()), *[1] * len(reply.ids)]
    sample.update_from_meta_info(args, reply.meta)
    generation.take_rows(args, sample, reply.meta)
