"""A generate function of the older form, as people write them for miles."""

from miles.rollout.sglang_rollout import GenerateState
from miles.utils.http_utils import post
from miles.utils.types import Sample


async def generate(args, sample, sampling_params, evaluation=False):
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer.encode(sample.prompt[0]["content"], add_special_tokens=False)
    payload = {"input_ids": prompt_ids, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(url, payload)
    new = output["meta_info"]["output_token_logprobs"]
    sample.tokens = prompt_ids + [entry[1] for entry in new]
    sample.rollout_log_probs = [entry[0] for entry in new]
    sample.response_length = len(new)
    sample.response = output["text"]
    sample.loss_mask = [1] * len(new)
    sample.update_from_meta_info(args, output["meta_info"])
    if sample.response_length > 2:
        sample.strip_last_output_tokens(1, state.tokenizer)
    assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    sample.metadata["style"] = args.their_style
    return sample


def add_arguments(parser):
    parser.add_argument("--their-style", default="plain", help="How it is done.")
    parser.add_argument("--custom-agent-function-path")


generate.add_arguments = add_arguments
