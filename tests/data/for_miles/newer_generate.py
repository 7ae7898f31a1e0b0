"""A generate function of the newer form, as people write them for miles."""

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_utils.generate_endpoint_utils import (
    compute_prompt_ids_from_sample,
    compute_request_payload,
    update_sample_from_response,
)
from miles.utils.http_utils import post


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    args, sample = input.args, input.sample
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = compute_prompt_ids_from_sample(input.state, sample)
    payload, halt = compute_request_payload(args, prompt_ids, input.sampling_params)
    if payload is None:
        sample.tokens = prompt_ids
        sample.status = halt
        return GenerateFnOutput(samples=sample)
    output = await post(url, payload)
    await update_sample_from_response(args, sample, payload=payload, output=output, update_loss_mask=True)
    return GenerateFnOutput(samples=sample)
