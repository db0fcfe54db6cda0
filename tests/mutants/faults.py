"""More than forty faults of careless edits, in all rooms, with the tests that ought to fail. __main__.py tries them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """`old`, which occurs once in the file, becomes `new`; then one of the tests in `targets` ought to fail."""

    name: str
    file: str
    old: str
    new: str
    targets: tuple[str, ...]
    effect: str


FAULTS = (
    # engine/scheduling
    Fault(
        "salt_ignored",
        "engine/scheduling/block_pool.py",
        "self._prefixes[block_ids[index - 1]] if index else cache_salt",
        'self._prefixes[block_ids[index - 1]] if index else ""',
        ("tests/engine/scheduling/test_block_pool.py",),
        "blocks of a salted prompt are found by prompts without a salt",
    ),
    Fault(
        "block_freed_in_use",
        "engine/scheduling/sequence_blocks.py",
        "num_blocks = self.num_needed(sequence)\n",
        "num_blocks = len(sequence.token_ids) // self.block_size\n",
        ("tests/engine/scheduling/test_sequence_blocks.py", "tests/engine/scheduling/test_scheduler.py"),
        "after a draft the last block, half full, is freed while its sequence goes on",
    ),
    Fault(
        "draft_beyond_end",
        "engine/scheduling/scheduler.py",
        "if reason is not None or newest != guess or following is None:",
        "if newest != guess or following is None:",
        ("tests/engine/scheduling/test_scheduler.py", "tests/engine/test_scheduler_machine.py"),
        "tokens of a draft are accepted after the one that ends the sequence",
    ),
    Fault(
        "length_before_stop",
        "engine/scheduling/sequence.py",
        "if self.sampling.params.stops_at(self.token_ids[-1], eos_token_ids):",
        "if len(self.token_ids) < self.max_len and self.sampling.params.stops_at(self.token_ids[-1], eos_token_ids):",
        ("tests/engine/scheduling/test_scheduler.py", "tests/engine/test_scheduler_machine.py"),
        "finish_reason is length where the last token that fits ends the text by itself",
    ),
    # engine/grammar
    Fault(
        "end_by_the_known",
        "engine/grammar/matcher.py",
        "may_end=self._num_seen + num_drafted >= num_before_end",
        "may_end=self._num_seen >= num_before_end",
        ("tests/engine/grammar/test_matcher.py",),
        "after drafts min_tokens counts the known tokens only, and forbids an end that is due",
    ),
    Fault(
        "exclusive_maximum_floor",
        "engine/grammar/schema/numbers.py",
        "return math.ceil(value) - 1 if is_outside else math.floor(value)",
        "return math.floor(value) - 1 if is_outside else math.floor(value)",
        ("tests/engine/grammar/schema/test_numbers.py", "tests/engine/grammar/schema/test_bounds.py"),
        "an exclusiveMaximum between two integers rules out the one below it",
    ),
    Fault(
        "min_properties_of_the_last",
        "engine/grammar/schema/objects.py",
        'names.min_properties = max(names.min_properties, count_of(node, "minProperties"))',
        'names.min_properties = count_of(node, "minProperties")',
        ("tests/engine/grammar/schema",),
        "of several schemas for an object the last one says how many properties it has at least",
    ),
    # engine/sampling
    Fault(
        "choices_alike",
        "engine/sampling/noise.py",
        "_ARGUMENTS.pack(seed, choice_index, position)",
        "_ARGUMENTS.pack(seed, 0, position)",
        ("tests/engine/sampling/test_noise.py",),
        "all choices of a request have the same noise, and so the same text",
    ),
    Fault(
        "bad_words_of_the_prompt",
        "engine/sampling/adjustments.py",
        "known[max(num_prompt, num_before - longest) :]",
        "known[max(0, num_before - longest) :]",
        ("tests/engine/sampling", "tests/engine/runner/test_sampler.py"),
        "a bad word is ruled out whose beginning stands in the prompt",
    ),
    # engine/model
    Fault(
        "qk_norms_swapped",
        "engine/model/norm.py",
        "zip(norms, heads, strict=False)",
        "zip(norms[::-1], heads, strict=False)",
        ("tests/parity/test_families.py", "tests/engine/model", "tests/engine/backends/cpu/test_decoder.py"),
        "queries get the norm of keys, and keys that of queries",
    ),
    Fault(
        "rotary_scale_of_cosines",
        "engine/model/rotary.py",
        "torch.stack((angles_PN.cos(), angles_PN.sin()), dim=1) * rotary.scale",
        "torch.stack((angles_PN.cos() * rotary.scale, angles_PN.sin()), dim=1)",
        ("tests/parity/test_families.py", "tests/engine/model", "tests/weights/families/test_rotary.py"),
        "the scale of YaRN stretches cosines and not sines",
    ),
    Fault(
        "eps_as_least_value",
        "engine/model/norm.py",
        "wide.square().mean(-1, keepdim=True) + norm.eps",
        "wide.square().mean(-1, keepdim=True).clamp(min=norm.eps)",
        ("tests/engine/model/test_norm.py",),
        "eps is a least value instead of a term",
    ),
    # engine/backends
    Fault(
        "presence_in_the_prompt",
        "engine/backends/reference/adjustments.py",
        "token_ids[counts > 0], counts[counts > 0]",
        "token_ids[counts >= 0], counts[counts >= 0]",
        ("tests/engine/sampling/test_adjustments.py", "tests/engine/runner/test_sampler.py"),
        "the presence penalty is for tokens of the prompt, too",
    ),
    Fault(
        "parallel_norm_too_late",
        "engine/model/layers.py",
        """            if not config.shared_norm:  # before attention is added to x
                writer.norm(f"{name}.ffn_norm", "x", "h2")
            attention("h", "x", "x")
""",
        """            attention("h", "x", "x")
            if not config.shared_norm:
                writer.norm(f"{name}.ffn_norm", "x", "h2")
""",
        ("tests/engine/backends/cpu/test_decoder.py", "tests/parity/test_families.py"),
        "the feed-forward of a parallel residual reads what attention has added",
    ),
    Fault(
        "native_top_p_of_everything",
        "engine/backends/cpu/csrc/draw.cpp",
        "if (row.top_p < 1.0) total = mass_of_largest(weights, num_blocks, row.top_k, kept);",
        "",
        ("tests/engine/backends/cpu/test_draw.py", "tests/engine/runner/test_sampler.py"),
        "top-p is a share of all tokens instead of those that top-k keeps",
    ),
    Fault(
        "native_window_of_one_more",
        "engine/backends/cpu/csrc/attention_kernel.h",
        "position >= window ? position - window + 1 : 0",
        "position > window ? position - window : 0",
        ("tests/engine/backends/cpu/test_attention.py",),
        "a query sees one token more than its window",
    ),
    Fault(
        "abandoned_token_counted",
        "engine/backends/gpu/token_counts.py",
        "if len(known) < seat.num_due:",
        "if len(known) < seat.num_due - 1:",
        ("tests/engine/backends/gpu/test_token_counts.py",),
        "after a step that failed its token stays in the counts for penalties",
    ),
    Fault(
        "any_proof_is_trusted",
        "engine/backends/gpu/selfcheck/proofs.py",
        "if _read(path) == proof.encode():",
        "if _read(path) is not None:",
        ("tests/engine/backends/gpu/selfcheck/test_proofs.py",),
        "a damaged file passes for the proof that a GPU's kernel computes right",
    ),
    # engine/runner
    Fault(
        "prompt_logprobs_shifted",
        "engine/runner/prompt_logprobs.py",
        "enumerate(scores, prompt.first_position + start)",
        "enumerate(scores, prompt.first_position + start - 1)",
        ("tests/engine/runner/test_logprobs.py", "tests/engine/runner/test_runner.py", "tests/engine/test_engine.py"),
        "each token of a prompt has the logprob of the token after it",
    ),
    Fault(
        "next_step_blamed",
        "engine/runner/overlap.py",
        "self._scheduler.abandon(ahead.batch, blames=False)",
        "self._scheduler.abandon(ahead.batch)",
        ("tests/engine/runner/test_overlap.py",),
        "a request that joined in the step after the one that failed is a suspect sooner",
    ),
    # engine/parallel, and what its ranks have
    Fault(
        "least_memory_of_the_last",
        "engine/parallel/ranks.py",
        "budget = min(budget, max(0, memory.budget_bytes - reserved_bytes))",
        "budget = max(0, memory.budget_bytes - reserved_bytes)",
        ("tests/engine/parallel/test_ranks.py",),
        "the cache is as large as the last rank has room for, even if the first has less",
    ),
    Fault(
        "bias_of_every_rank",
        "weights/sharding.py",
        "replace(source, is_zero=self.rank > 0) if is_bias",
        "source if is_bias",
        ("tests/weights/test_sharding.py",),
        "each rank adds the bias of a sum, so it counts several times",
    ),
    # engine/process
    Fault(
        "pipe_left_open",
        "engine/process/process_client.py",
        """        self._writer.join()
        self._connection.close()
        with contextlib.suppress(ConnectionError):""",
        """        self._writer.join()
        with contextlib.suppress(ConnectionError):""",
        ("tests/engine/process/test_process_client.py", "tests/engine/process/test_client.py"),
        "each engine that dies leaves a descriptor of the server open",
    ),
    Fault(
        "first_abort_alone",
        "engine/process/loop.py",
        """                    for request_id in request_ids:
                        engine.abort(request_id)""",
        "                    engine.abort(request_ids[0])",
        ("tests/engine/process/test_loop.py", "tests/engine/process/test_client.py"),
        "of several requests of one client the first alone is aborted; the others are computed to their ends",
    ),
    Fault(
        "second_death_loses_tokens",
        "engine/request.py",
        "generated_token_ids=(*self.generated_token_ids, *token_ids)",
        "generated_token_ids=tuple(token_ids)",
        ("tests/engine/process/test_supervisor.py",),
        "a request that a server has resumed loses its tokens from before when an engine dies",
    ),
    # server/http
    Fault(
        "bytes_of_refused_bodies",
        "server/http/body.py",
        """            yield body
        finally:
            self._arriving.pop(limit, None)
            self._num_bytes -= len(body)""",
        """            yield body
            self._num_bytes -= len(body)
        finally:
            self._arriving.pop(limit, None)""",
        ("tests/server/http/test_body.py",),
        "bodies that are refused, late or cut off count for ever, until honest ones are given up",
    ),
    Fault(
        "trailers_as_headers",
        "server/http/protocol.py",
        '        if self._part == "body":\n            return  # a trailer',
        "        if False:\n            return  # a trailer",
        ("tests/server/http/test_protocol.py", "tests/server/http/test_heads.py"),
        "fields after a chunked body pass for headers of the request",
    ),
    Fault(
        "busy_after_close",
        "server/http/connections.py",
        """        self._idle.pop(connection, None)
        self._busy.discard(connection)""",
        "        self._idle.pop(connection, None)",
        ("tests/server/http/test_connections.py",),
        "a client that hangs up during its request takes the room of a connection for ever",
    ),
    # server/text, schemas, tools
    Fault(
        "stop_within_a_stop",
        "server/text/stop.py",
        "self.matches[state] = self.matches[state] or self.matches[fall]",
        "self.matches[state] = self.matches[state]",
        ("tests/server/text",),
        "a stop string is not found within the beginning of a longer one",
    ),
    Fault(
        "unfinished_character_lost",
        "server/text/output.py",
        'text = self._feed(self._detokenizer.decode(b"", True)) if channel != self._channel else ""',
        'text = ""\n        if channel != self._channel:\n            self._detokenizer.reset()',
        ("tests/server/text/test_output.py",),
        "bytes of an unfinished character before another channel vanish",
    ),
    Fault(
        "falsy_foreign_field",
        "server/schemas/fields.py",
        "if value is False:  # of a switch",
        "if not value:  # of a switch",
        ("tests/server/schemas/test_fields.py", "tests/server/api/test_chat_refused.py"),
        "a field of another route is dropped without a word if it is 0 or empty",
    ),
    Fault(
        "array_separator",
        "server/tools/json_list.py",
        'between: str = ", "',
        'between: str = ","',
        ("tests/server/tools/test_grammar.py", "tests/server/tools/test_formats.py"),
        "forced calls are separated otherwise than the model was trained to",
    ),
    Fault(
        "begin_as_text",
        "server/tools/mistral.py",
        "calls.repeated(spell(BEGIN))",
        "calls.repeated(literal(BEGIN))",
        ("tests/server/tools/test_grammar.py", "tests/server/tools/test_formats.py"),
        "before a second call the mark is forced as text instead of as its token",
    ),
    # server/completions and what builds on it
    Fault(
        "cached_tokens_of_each_choice",
        "server/completions/run.py",
        "cached = sum(self._num_cached[:: self._plan.body.n or 1])",
        "cached = sum(self._num_cached)",
        ("tests/server/completions/test_run.py", "tests/server/api/test_completions.py"),
        "cached tokens of a prompt are counted once for each choice",
    ),
    Fault(
        "open_calls_cut",
        "server/responses/truncation.py",
        "and not (is_result or open_calls):",
        "and not is_result:",
        ("tests/server/responses/test_truncation.py",),
        "a call is dropped and a result that belongs to it stays",
    ),
    Fault(
        "client_errors_as_ours",
        "server/operations/tracing.py",
        'if status >= 500 or (status < 400 and "error" in fields):',
        'if status >= 400 or "error" in fields:',
        ("tests/server/operations/test_tracing.py",),
        "requests that clients get wrong count as errors of the server",
    ),
    Fault(
        "newline_after_the_last_event",
        "server/cli/terminal.py",
        'has_begun = has_begun or text != ""',
        'has_begun = text != ""',
        ("tests/server/cli/test_terminal.py", "tests/server/cli/test_main.py"),
        "the line is not ended where the last event has no text",
    ),
    Fault(
        "failed_as_aborted",
        "server/completions/run.py",
        "unfinished = FinishReason.ERROR if self.is_failed else FinishReason.ABORT",
        "unfinished = FinishReason.ABORT",
        ("tests/server/completions", "tests/server/api"),
        "metrics and logs say that clients went where the engine failed",
    ),
    Fault(
        "prompt_tokens_of_no_prompt",
        "server/core/metrics.py",
        "self._prompt_tokens.observe(num_prompt_tokens)",
        "self._prompt_tokens.observe(num_generated_tokens)",
        ("tests/server/core/test_metrics.py", "tests/server/api/test_operations.py"),
        "metrics say that prompts are as long as answers",
    ),
    Fault(
        "rejections_of_503_uncounted",
        "server/core/metrics.py",
        "if status_of(told) in (429, 503):",
        "if status_of(told) == 429:",
        ("tests/server/core/test_metrics.py", "tests/server/api/test_operations.py"),
        "metrics leave out completions that are refused while the server drains",
    ),
    # server/jobs
    Fault(
        "shown_before_it_is_stored",
        "server/jobs/recorder.py",
        """        job.num_bytes += await self._store.append(job.completion_id, running.num_batches, outputs)
        running.batches.append(outputs)
""",
        """        running.batches.append(outputs)
        job.num_bytes += await self._store.append(job.completion_id, running.num_batches - 1, outputs)
""",
        ("tests/server/jobs",),
        "readers see outputs that a full disk or a crash then loses",
    ),
    Fault(
        "seed_of_the_key_alone",
        "server/jobs/job.py",
        "json.dumps([self.owner, self.key, self.digest])",
        "json.dumps([self.key, self.digest])",
        ("tests/server/jobs", "tests/server/api/test_idempotency.py"),
        "two owners with the same idempotency key and body get the same drawn seed",
    ),
    Fault(
        "missing_batch_unnoticed",
        "server/jobs/sqlite/rows.py",
        "        if n != expected:\n",
        "        if n < expected:\n",
        ("tests/server/jobs/sqlite",),
        "a batch that is missing in the journal goes unnoticed, and its tokens are lost",
    ),
    # weights
    Fault(
        "compared_beyond_the_end",
        "weights/stored_tensor.py",
        "size = min(CHUNK_BYTES, self.end - done)",
        "size = CHUNK_BYTES",
        ("tests/weights/test_stored_tensor.py",),
        "two equal tensors differ if what follows them in their files does",
    ),
    Fault(
        "yarn_last_frequency",
        "weights/families/rotary.py",
        "first, last = max(first, 0), min(last, dim - 1)",
        "first, last = max(first, 0), min(last, dim // 2 - 1)",
        ("tests/weights/families/test_rotary.py", "tests/parity/test_families.py"),
        "YaRN blends fewer frequencies",
    ),
)
