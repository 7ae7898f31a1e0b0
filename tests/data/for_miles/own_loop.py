"""A tool loop of its own over `/generate`, with masks kept by hand; as people write them for miles."""

from argparse import ArgumentParser

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.inference_rollout.compatibility import load_generate_function
from miles.utils.http_utils import post
from miles.utils.types import Sample


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    args, state = input.args, input.state
    sample = input.sample
    assert sample.status in {Sample.Status.PENDING, Sample.Status.ABORTED}
    if input.evaluation:
        return await load_generate_function("miles.rollout.generate_hub.single_turn.generate")(input)
    tokenizer = state.tokenizer
    prompt_ids = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]  # text: --apply-chat-template
    response_ids, loss_mask, log_probs, info = [], [], [], None
    for turn in range(args.own_turns):
        payload = {
            "input_ids": prompt_ids + response_ids,
            "sampling_params": input.sampling_params | {"max_new_tokens": 8},
            "return_logprob": True,
        }
        output = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload)
        info = output["meta_info"]
        if info["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            break
        new = info["output_token_logprobs"]
        response_ids += [token for _, token, _ in new]
        log_probs += [value for value, _, _ in new]
        loss_mask += [1] * len(new)
        if turn + 1 < args.own_turns:
            observation = tokenizer(" ok", add_special_tokens=False)["input_ids"]
            response_ids += observation
            log_probs += [0.0] * len(observation)
            loss_mask += [0] * len(observation)
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = tokenizer.decode(response_ids)
    sample.loss_mask, sample.rollout_log_probs = loss_mask, log_probs
    sample.update_from_meta_info(args, info)
    return GenerateFnOutput(samples=sample)


def add_arguments(parser: ArgumentParser):
    group = parser.add_argument_group("own loop")
    group.add_argument("--own-turns", type=int, default=2)


generate.add_arguments = add_arguments
