"""Bugs of one line each, and the tests that notice them.

    python tests/mutations.py            all of them, in a few minutes
    python tests/mutations.py 3 17       some of them

Each mutation is applied to a copy of the project, its test runs there, and has to turn red (and be
green in the copy before). The bugs are of the kinds that users of such code report; the table in
tests/README.md, made by `--table`, names them. A mutation whose line is gone from the source is an
error, so that this list ages with the code.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("*.py", "*.toml", "environments", "assets", "configs", "tests", "tools")
COPIED += ("benchmarks", "experiments")  # of which tests import a little


@dataclass(frozen=True)
class Mutation:
    """In `file`, `old` (which occurs once) becomes `new`; `test` turns red."""

    bug: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = (
    Mutation(
        "the gradients of other ranks are not added",
        "distributed.py",
        "dist.all_reduce(flat)",
        "dist.all_reduce(flat.clone())",
        "test_distributed.py::test_ranks_compute_what_one_process_does",
    ),
    Mutation(
        "Adam moves a parameter that no rank has a gradient for",
        "distributed.py",
        "if owned else None",
        "if True else None",
        "test_distributed.py::test_ranks_compute_what_one_process_does",
    ),
    Mutation(
        "a rank keeps the adapter that it started with",
        "distributed.py",
        "parameter.copy_(parameters[name])",
        "parameter.clone()",
        "test_distributed.py::test_ranks_compute_what_one_process_does",
    ),
    Mutation(
        "alpha / r lost",
        "lora.py",
        "(F.linear(x, A) * self.scaling[name]) @ B.T.contiguous()",
        "F.linear(x, A) @ B.T.contiguous()",
        "test_lora.py::test_the_update_is_alpha_over_r_times_B_A",
    ),
    Mutation(
        "B not zero at the start",
        "lora.py",
        "B = torch.zeros(*experts, rows, config.rank,",
        "B = torch.ones(*experts, rows, config.rank,",
        "test_lora.py::test_a_fresh_adapter_changes_not_a_bit",
    ),
    Mutation(
        "a merged model stays adapted when the adapter is off",
        "lora.py",
        "if self.merged is not None and segments == [(TRAINABLE, None)]:",
        "if self.merged is not None:",
        "test_lora.py::test_a_disabled_adapter_is_the_base_merged_or_not",
    ),
    Mutation(
        "the base is not frozen",
        "lora.py",
        "    model.requires_grad_(False)\n",
        "",
        "test_lora.py::test_only_A_and_B_are_trained_and_all_of_them_by_the_second_step",
    ),
    Mutation(
        "every row gets the adapter of the first segment",
        "lora.py",
        "y[rows] = y[rows] + self.update(name, x[rows])",
        "y[rows] = y[rows] + self.update(segments[0][0], x[rows])",
        "test_lora.py::test_every_row_gets_the_adapter_of_its_segment_and_the_rest_the_base",
    ),
    Mutation(
        "the adapter of one row's experts acts on those of every row",
        "lora.py",
        "pairs.of(rows)",
        "pairs.of(slice(None))",
        "test_experts.py::test_every_row_gets_the_experts_of_its_adapter_and_the_rest_the_base",
    ),
    Mutation(
        "a slot of the stack keeps what a larger adapter left in it",
        "segments.py",
        "            A[slot] = B[slot] = 0\n",
        "",
        "test_segments.py::test_a_slot_keeps_nothing_of_the_adapter_before",
    ),
    Mutation(
        "updates of several adapters go back to other rows",
        "segments.py",
        "y.index_add_(0, self.targets, wide.index_select(0, self.places))",
        "y.index_add_(0, self.targets, wide[: len(self.targets)])",
        "test_segments.py::test_a_mix_of_adapters_equals_each_row_alone",
    ),
    Mutation(
        "an adapter with live requests is paged out",
        "engine.py",
        "idle = [name for name in inside if name not in live]",
        "idle = inside",
        "test_segments.py::test_mixes_evictions_and_paging_change_no_sample",
    ),
    Mutation(
        "an adapter that changed on disk meets the keys and values of the old one",
        "engine.py",
        "if fingerprint(config, tensors) != adapter.fingerprint:",
        "if False:",
        "test_segments.py::test_a_directory_that_is_no_longer_the_same_fails_its_own_requests_alone",
    ),
    Mutation(
        "an expert's output goes back to another token",
        "experts.py",
        "pairs)[order.argsort()]",
        "pairs)[order]",
        "test_experts.py::test_the_mixture_is_the_loop_over_tokens_and_experts",
    ),
    Mutation(
        "rotary embedding interleaved instead of half-split",
        "model.py",
        "first, second = x.chunk(2, dim=-1)",
        "first, second = x[..., ::2], x[..., 1::2]",
        "test_model.py::test_logits_equal_a_naive_computation",
    ),
    Mutation(
        "a cached token sees one key less than it should",
        "model.py",
        "<= positions[..., None]\n        mask = ",
        "< positions[..., None].clamp(min=1)\n        mask = ",
        "test_model.py::test_prefill_equals_chunks_equals_tokens_equals_the_full_pass",
    ),
    Mutation(
        "temperature missing in the trainer's logprobs",
        "head.py",
        "F.linear(hidden, weight[block]).float().div_(temperature)",
        "F.linear(hidden, weight[block]).float()",
        "test_model.py::test_token_logprobs_equal_the_naive_log_softmax",
    ),
    Mutation(
        "logprobs shifted by one position",
        "packing.py",
        "torch.stack((rows[mask], input_ids[:, 1:][mask]))",
        "torch.stack((rows[mask], input_ids[:, :-1][mask]))",
        "test_model.py::test_token_logprobs_equal_the_naive_log_softmax",
    ),
    Mutation(
        "streams share one token more than they have in common",
        "packing.py",
        "            return number\n",
        "            return number + 1\n",
        "test_packing.py::test_what_is_shared_or_packed_changes_neither_logprobs_nor_gradients",
    ),
    Mutation(
        "a stream continues from the beginning of another",
        "packing.py",
        "rows[s, :shared] = rows[before, :shared] if shared else 0",
        "rows[s, :shared] = rows[order[0], :shared] if shared else 0",
        "test_packing.py::test_what_is_shared_or_packed_changes_neither_logprobs_nor_gradients",
    ),
    Mutation(
        "half of the norm's gradient is missing",
        "model.py",
        "g.addcmul_(normed, along, value=-1)",
        "g",
        "test_model.py::test_the_norm_and_its_gradients_are_those_of_the_formula",
    ),
    Mutation(
        "tool responses carry loss",
        "rollout.py",
        "self.loss_mask += [0] * len(token_ids)",
        "self.loss_mask += [1] * len(token_ids)",
        "test_rollout.py::test_the_stream_grows_and_the_mask_marks_what_was_sampled",
    ),
    Mutation(
        "the stop token is dropped",
        "engine.py",
        "self.tokens[slot, sampled].tolist(),",
        "self.tokens[slot, sampled].tolist()[: -1 if stopped[row] else None],",
        "test_rollout.py::test_stop_tokens_are_sampled_tokens_with_logprobs",
    ),
    Mutation(
        "a token is drawn within its block by the uniform that chose the block",
        "engine.py",
        "invert(inside.double(), rest)[0]",
        "invert(inside.double(), uniform[:, None].double())[0]",
        "test_rollout.py::test_a_draw_in_blocks_is_the_draw_from_the_whole_distribution",
    ),
    Mutation(
        "a slot keeps the stop tokens of the stream before",
        "engine.py",
        "        self.stops[slot] = -1\n",
        "",
        "test_rollout.py::test_a_slot_forgets_the_stop_tokens_of_the_stream_before",
    ),
    Mutation(
        "a new adapter reuses the old one's cached keys and values",
        "engine.py",
        "np.flatnonzero(self.owner == stream.owner)",
        "np.arange(self.slots)",
        "test_rollout.py::test_an_adapter_never_meets_the_cache_of_another",
    ),
    Mutation(
        "advantages normalised over the batch instead of the group",
        "grpo.py",
        "rewards_P_G - rewards_P_G.mean(dim=1, keepdim=True)",
        "rewards_P_G - rewards_P_G.mean()",
        "test_grpo.py::test_advantages_are_rewards_about_the_mean_of_their_group",
    ),
    Mutation(
        "no clip at all for negative advantages",
        "grpo.py",
        "-torch.minimum(ratio * advantages, clipped * advantages)",
        "-ratio.clamp(1 - clip_low, 1 + clip_high).where(advantages > 0, ratio) * advantages",
        "test_grpo.py::test_clip_is_pessimistic_for_both_signs",
    ),
    Mutation(
        "the denominator is that of the micro-batch",
        "grpo.py",
        "return masked_sum(loss, mask) / denominator, metrics",
        "return masked_sum(loss, mask) / mask.sum(), metrics",
        "test_grpo.py::test_micro_batch_split_and_order_change_nothing",
    ),
    Mutation(
        "the KL loss is not weighted, so that it is right on-policy only",
        "grpo.py",
        "loss = weight * 0.5 * (logprobs - reference_logprobs) ** 2",
        "loss = 0.5 * (logprobs - reference_logprobs) ** 2",
        "test_grpo.py::test_gradient_of_the_kl_loss_is_that_of_the_reverse_kl",
    ),
    Mutation(
        "PEFT's key prefix is missing",
        "broadcast.py",
        "prefixed = {PREFIX + name:",
        "prefixed = {name:",
        "test_broadcast.py::test_the_files_are_as_peft_writes_them",
    ),
    Mutation(
        "an adapter becomes visible before it is complete",
        "broadcast.py",
        'temporary = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")',
        "temporary = directory",
        "test_broadcast.py::test_killed_at_any_moment_of_publishing_"
        "a_reader_sees_the_old_version_or_the_new",
    ),
    Mutation(
        "the two codes of a byte change places",
        "quant.py",
        "codes[:, 0] << 4 | codes[:, 1]",
        "codes[:, 1] << 4 | codes[:, 0]",
        "test_quant.py::test_every_code_is_the_nearest_and_the_error_has_its_bound",
    ),
    Mutation(
        "autograd keeps every dequantised weight",
        "quant.py",
        "return FrozenProduct.apply(x, self)",
        "return F.linear(x, self.weight, self.bias)",
        "test_quant.py::test_only_packed_storage_is_kept_and_nothing_is_saved_for_the_backward_pass",
    ),
    Mutation(
        "the optimizer holds other parameters than the adapter's",
        "start.py",
        "torch.optim.Adam(parameters.values(),",
        "torch.optim.Adam(list(parameters.values())[1:],",
        "test_train.py::test_the_optimizer_holds_the_adapter_and_the_adapter_alone",
    ),
    Mutation(
        "temperature missing in the gradient of a trained head",
        "head.py",
        "upstream = upstream / ctx.temperature",
        "upstream = upstream / 1.0",
        "test_model.py::test_token_logprobs_equal_the_naive_log_softmax",
    ),
    Mutation(
        "full fine-tuning samples from keys and values of the weights before",
        "train.py",
        "            self.engine.drop_cache()\n            return",
        "            return",
        "test_full.py::test_keys_and_values_of_the_weights_before_serve_nobody",
    ),
    Mutation(
        "the reference of full fine-tuning is trained along",
        "start.py",
        "frozen = copy.deepcopy(model).requires_grad_(False)",
        "frozen = model",
        "test_full.py::test_every_weight_moves_and_the_reference_does_not",
    ),
    Mutation(
        "a resumed run forgets the optimizer's moments",
        "run.py",
        '        optimizer.load_state_dict(state["optimizer"])\n',
        "",
        "test_train.py::test_a_run_made_longer_is_the_long_run",
    ),
    Mutation(
        "a batch is sampled further ahead than the bound on staleness",
        "pipeline.py",
        "range(batch, min(batch + self.staleness + 1, end))",
        "range(batch, min(batch + self.staleness + 2, end))",
        "test_pipeline.py::test_batches_come_in_order_once_each_and_never_too_old",
    ),
    Mutation(
        "a version is retired while a batch under way names it",
        "train.py",
        "self.alive.keys() - self.pipeline.versions - {run.step}",
        "self.alive.keys() - {run.step}",
        "test_pipeline.py::test_batches_come_in_order_once_each_and_never_too_old",
    ),
    Mutation(
        "a run from an adapter has the base for its reference",
        "update.py",
        "[(REFERENCE, None)] if started_from_one else []",
        "[]",
        "test_train.py::test_a_run_from_an_adapter_starts_as_it_and_refers_to_it",
    ),
    Mutation(
        "a demonstration never says its end of turn",
        "chat.py",
        "return [*ids, self.end_of_turn_id]",
        "return ids",
        "test_sft.py::test_loss_is_on_what_the_assistant_says_and_its_end_of_turn",
    ),
    Mutation(
        "the assistant's messages in a prompt carry loss",
        "sft.py",
        "if turn < context:",
        "if False:",
        "test_sft.py::test_of_a_prompt_nothing_carries_loss_and_texts_are_messages",
    ),
    Mutation(
        "nulls that parquet fills up with carry loss",
        "sft.py",
        "else without_nulls(line)",
        "else line",
        "test_sft.py::test_the_nulls_that_parquet_fills_up_with_are_not_learned",
    ),
    Mutation(
        "a run on a 4-bit base is chatted with on the unquantised one",
        "tools/viewer.py",
        'if self.config.quantize == "nf4":',
        "if False:",
        "test_viewer.py::test_a_conversation_is_with_the_base_that_the_run_had",
    ),
    Mutation(
        "a judge's failure is a reward of 0",
        "environments/judge.py",
        """                await asyncio.sleep(pause)
        return await self.ask_once(body)
""",
        """                await asyncio.sleep(pause)
        return 0.0
""",
        "test_scale.py::test_a_judge_that_fails_ends_the_run_and_is_no_reward",
    ),
    Mutation(
        "samples of one question count as independent draws",
        "run.py",
        "            n = p * (1 - p) / variance\n",
        "            pass\n",
        "test_scale.py::test_samples_of_one_question_are_no_independent_draws",
    ),
    Mutation(
        "half an optimizer step is saved as a whole one",
        "train.py",
        "            whole = False\n            try:",
        "            try:",
        "test_train.py::test_half_a_step_is_no_step",
    ),
    Mutation(
        "a sampler that stays behind is never found out",
        "update.py",
        "before.answer.logprobs) > moved / 4",
        "before.answer.logprobs) >= 0",
        "test_train.py::test_a_sampler_that_stays_behind_is_found_once_the_trainer_has_moved_"
        "and_a_good_one_never",
    ),
    Mutation(
        "the plan gives frozen matrices a gradient",
        "tools/plan.py",
        "costs.backward += product * arrives + product * full",
        "costs.backward += product * arrives + product",
        "test_scale.py::test_planned_flops_are_those_that_torch_counts",
    ),
)


def table() -> str:
    """The rows of tests/README.md."""
    lines = ["| bug put in | where | test that turns red |", "|---|---|---|"]
    return "\n".join(lines + [f"| {m.bug} | `{m.file}` | `{m.test}` |" for m in MUTATIONS]) + "\n"


def check_sources() -> None:
    """ValueError for a mutation that no longer applies."""
    for mutation in MUTATIONS:
        count = (ROOT / mutation.file).read_text().count(mutation.old)
        if count != 1:
            raise ValueError(f"{mutation.file}: {mutation.old!r} occurs {count} times, not once")


def passes(directory: Path, test: str) -> bool:
    """Whether the test passes in the copy; RuntimeError if it could not be run at all."""
    options = ["-x", "-m", "", "--hypothesis-profile=mutations"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/{test}"]
    environment = os.environ | {"CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: tests failed; others: no such test, a broken run
        raise RuntimeError(f"{test}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode == 0


def in_a_copy(mutation: Mutation | None, test: str) -> bool:
    """Whether the test passes in a copy of the project, mutated or not."""
    with tempfile.TemporaryDirectory() as directory:
        for pattern in COPIED:
            for source in ROOT.glob(pattern):
                target = Path(directory) / source.name
                (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        if mutation:
            file = Path(directory) / mutation.file
            file.write_text(file.read_text().replace(mutation.old, mutation.new))
        return passes(Path(directory), test)


def turns_red(mutation: Mutation) -> bool:
    return not in_a_copy(mutation, mutation.test)


def main(arguments: list[str]) -> int:
    if arguments == ["--table"]:
        print(table(), end="")
        return 0
    check_sources()
    chosen = [int(number) for number in arguments] or range(1, len(MUTATIONS) + 1)
    for test in dict.fromkeys(MUTATIONS[number - 1].test for number in chosen):
        if not in_a_copy(None, test):
            raise SystemExit(f"{test} is red without any mutation")
    survivors = 0
    for number in chosen:
        mutation = MUTATIONS[number - 1]
        red = turns_red(mutation)
        survivors += not red
        print(f"{number:2} {'red' if red else 'SURVIVED'}  {mutation.bug}", flush=True)
    print(f"{len(chosen) - survivors} passed, {survivors} failed")
    return survivors


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
