"""Let an engine serve a small RWKV-7 model with random weights, and compare its sequences with each one alone.

    python examples/engines/check.py ENGINE [--prefix-cache] [--eager] [--folder FOLDER]

ENGINE is vllm or sglang, which must be installed beside its plugin. Prompts are longer than the engine may read in a
step, and more than it may serve at once; two rounds of them let the second one find what the first one left in the
prefix cache. Exits with 1 if a token differs.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from serve import prefill, random_model  # noqa: E402

from rwkv_jit.nn import RWKV7  # noqa: E402

VOCAB, AT_ONCE, IN_A_STEP, LONGEST = 512, 4, 32, 512


def alone(model: RWKV7, prompt: list[int], count: int) -> list[int]:
    """Return the most likely tokens after a prompt, read as `serve.py` does."""
    pool = model.new_pool(1)
    (slot,) = pool.allocate()
    found, piece = [], prompt
    for _ in range(count):
        piece = prefill(model, pool, [(slot, piece)]).argmax(-1).tolist()
        found += piece
    return found


def with_vllm(folder: Path, options: argparse.Namespace):
    """Return what reads prompts and writes tokens after each."""
    from vllm import LLM, SamplingParams

    mode = {"enforce_eager": True} if options.eager else {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}
    mode |= {"enable_prefix_caching": True, "block_size": 16} if options.prefix_cache else {}
    engine = LLM(
        str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST, max_num_seqs=AT_ONCE,
        max_num_batched_tokens=IN_A_STEP, gpu_memory_utilization=0.3, **mode,
    )  # fmt: skip

    def write(prompts: list[list[int]], counts: list[int]) -> tuple[list[list[int]], int]:
        greedy = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in counts]
        done = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy)
        return [list(x.outputs[0].token_ids) for x in done], sum(x.num_cached_tokens or 0 for x in done)

    return write


def with_sglang(folder: Path, options: argparse.Namespace):
    """Return what reads prompts and writes tokens after each."""
    import sglang

    mode = {} if torch.cuda.is_available() else {"device": "cpu", "attention_backend": "torch_native"}
    engine = sglang.Engine(
        model_path=str(folder), skip_tokenizer_init=True, dtype="float32", context_length=LONGEST,
        max_running_requests=AT_ONCE, chunked_prefill_size=IN_A_STEP, max_total_tokens=4 * LONGEST,
        mem_fraction_static=0.3, disable_radix_cache=not options.prefix_cache, disable_cuda_graph=options.eager, **mode,
    )  # fmt: skip

    def write(prompts: list[list[int]], counts: list[int]) -> tuple[list[list[int]], int]:
        greedy = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in counts]
        done = engine.generate(input_ids=prompts, sampling_params=greedy)
        return [list(x["output_ids"]) for x in done], sum(x["meta_info"]["cached_tokens"] for x in done)

    return write


def check(folder: Path, options: argparse.Namespace) -> int:
    """Return how many texts differ."""
    import rwkv7_slots

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(3, 128, 32, VOCAB, 0, "cpu", torch.float32)
    rwkv7_slots.write_folder(model.state_dict(), folder, LONGEST)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in (1, 7, 70, 33, 5, 100, 2, 19, 40)]
    prompts += [[*prompts[-1], 5, 6, 7], [*prompts[-1], 9, 9]]
    counts = [6 + number for number in range(len(prompts))]
    write = {"vllm": with_vllm, "sglang": with_sglang}[options.engine](folder, options)
    model = model.to(device)
    expected = [alone(model, *each) for each in zip(prompts, counts, strict=True)]
    wrong = 0
    for number in range(2):
        found, hits = write(prompts, counts)
        same = sum(x == y for x, y in zip(found, expected, strict=True))
        wrong += len(prompts) - same
        print(f"round {number + 1}: {same} of {len(prompts)} sequences as alone, {hits} tokens from the prefix cache")
    return wrong


def main() -> int:
    """Run the program, and return what it exits with."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=["vllm", "sglang"])
    parser.add_argument("--prefix-cache", action="store_true", help="let the engine keep states of prompts")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--folder", type=Path, help="where the model goes; by default one that is deleted")
    options = parser.parse_args()
    if options.folder is not None:
        return int(check(options.folder, options) > 0)
    with tempfile.TemporaryDirectory() as folder:
        return int(check(Path(folder), options) > 0)


if __name__ == "__main__":
    sys.exit(main())
