"""A generate function that is a class with state, and gives several samples; as people write them for miles."""

import asyncio
import copy

from miles.rollout.generate_utils import generate_endpoint_utils as endpoint
from miles.rollout.sglang_rollout import GenerateState
from miles.utils.http_utils import post
from miles.utils.misc import load_function
from miles.utils.types import Sample


def shout(text: str) -> str:
    return text.upper()


class BestOfTwo:
    def __init__(self):
        self.lock = asyncio.Lock()
        self.calls = 0

    async def __call__(self, args, sample: Sample, sampling_params, evaluation: bool = False) -> list[Sample]:
        state = GenerateState(args)
        async with self.lock:
            self.calls += 1
        siblings = [copy.deepcopy(sample), copy.deepcopy(sample)]
        return list(await asyncio.gather(*(self.one(args, state, each, dict(sampling_params)) for each in siblings)))

    async def one(self, args, state, sample, sampling_params):
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        async with state.generate_fn_semaphore:
            if state.aborted:
                sample.status = Sample.Status.ABORTED
                return sample
            ids = endpoint.compute_prompt_ids_from_sample(state, sample)
            payload, status = endpoint.compute_request_payload(args, input_ids=ids, sampling_params=sampling_params)
            if payload is None:
                sample.status = status
                return sample
            output = await post(url, payload, headers={"X-SMG-Routing-Key": str(sample.index)})
        await endpoint.update_sample_from_response(args, sample, payload, output, update_loss_mask=True)
        sample.rollout_id = sample.index
        sample.metadata["shouted"] = load_function(args.shout_path)(sample.response)
        sample.reward = {"score": float(sample.effective_response_length), "turns": 1}
        return sample

    @staticmethod
    def add_arguments(parser):
        parser.add_argument("--shout-path", type=str, default="class_generate.shout")
        parser.add_argument("--best-of", type=int, choices=[1, 2], default=2)


generate = BestOfTwo
