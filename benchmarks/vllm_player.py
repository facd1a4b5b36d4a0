"""vLLM as a player of benchmarks/sampling.py: a JSON line in, a JSON line out.

    PYTHON benchmarks/vllm_player.py CHECKPOINT ADAPTER SLOTS      started by sampling.py

The engine lives in this process, so that its CPU time is this process's, and has a prefix cache,
which is emptied before each work. Each prompt is computed in one step, as `tools/vllm_server.py`
has it on a CPU. enforce_eager is left at vLLM's default, which with LoRA compiles nothing on a CPU
either (platforms/cpu.py of 0.32), and is a fifth faster.
"""

import argparse
import json
import os
import sys
import time

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "3",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="directory of the model")
    parser.add_argument("adapter", help="directory of a published adapter of rank 8 at most")
    parser.add_argument("slots", type=int, help="requests in a batch")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    import vllm
    from vllm.lora.request import LoRARequest

    llm = vllm.LLM(
        options.checkpoint,
        skip_tokenizer_init=True,
        dtype="float32",
        enable_lora=True,
        max_lora_rank=8,
        max_loras=1,
        max_num_seqs=options.slots,
        max_model_len=1024,
        max_num_batched_tokens=8192,
        enable_chunked_prefill=False,
        enable_prefix_caching=True,
        generation_config="vllm",
    )
    lora = LoRARequest("published", 1, options.adapter)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = {"version": vllm.__version__}
        if asked:
            sampling = vllm.SamplingParams(
                temperature=asked["temperature"],
                max_tokens=asked["new"],
                ignore_eos=True,  # so lengths are exact, without min_tokens' logits processor
                detokenize=False,
            )
            llm.reset_prefix_cache()
            streams = [list(prompt) for prompt in asked["prompts"]]
            wall, cpu = time.perf_counter(), time.process_time()
            for forced in asked["forced"]:
                prompts = [{"prompt_token_ids": stream} for stream in streams]
                outputs = llm.generate(prompts, sampling, lora_request=lora, use_tqdm=False)
                sampled = [list(output.outputs[0].token_ids) for output in outputs]
                streams = [s + new + forced for s, new in zip(streams, sampled, strict=True)]
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            answer |= {"token_ids": sampled, "wall": wall, "cpu": cpu}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
