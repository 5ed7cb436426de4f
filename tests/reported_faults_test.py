"""Faults that other projects reported, and the tests that keep them out.

A1 to A14 have a small input with its right answer, which became a test; of the
numbered ones, the behaviour to have is known. Where there is nothing that could
have the fault yet, a reason stands in place of tests.
"""

import ast
import functools
import pathlib
from typing import NamedTuple

from absl.testing import absltest
from absl.testing import parameterized

_TESTS = pathlib.Path(__file__).parent
_REPORTS = tuple(f'A{i}' for i in range(1, 15))
_NUMBERS = (3, 9, 10, 12, 13, 16, 17, 18, 20, 21, 22, 23, 24, 25)
_NUMBERS += (28, 29, 30, 31, 32, 33, 34, 35, 36)


class _Fault(NamedTuple):
  """A fault, and what keeps it out.

  Attributes:
    number: 'A1' to 'A14', or a number.
    where: where it was reported.
    what: what went wrong.
    tests: tests that would fail; 'file::Class::test', under tests/.
    reason: why there are none.
  """

  number: str | int
  where: str
  what: str
  tests: tuple[str, ...] = ()
  reason: str = ''


_FAULTS = (
    _Fault(
        'A1',
        'NVIDIA/Model-Optimizer#1397',
        'a block of zeros got a scale that is NaN',
        (
            'quantization_test.py::ReportsTest'
            '::test_a1_no_scale_byte_of_zeros_is_nan',
            'quantization_test.py::ZeroTest'
            '::test_zero_block_beside_a_one_is_exact',
            'export_test.py::GlobalScaleTest'
            '::test_report_a1_zeros_have_finite_scales',
        ),
    ),
    _Fault(
        'A2',
        'pytorch/ao#4598, NVIDIA/Model-Optimizer#1382',
        'blocks beside a large one vanished, and nobody was told',
        (
            'quantization_test.py::ZeroTest'
            '::test_block_whose_scale_underflows_is_zero_not_nan',
            'diagnostics_test.py::QuantizationErrorTest'
            '::test_report_a2_counts_underflow',
            'experiments/grpo_test.py::WarningsTest'
            '::test_report_a2_underflow_is_said_once_for_every_weight',
        ),
    ),
    _Fault(
        'A3',
        'vllm-project/vllm#54974, NVIDIA/TensorRT-LLM#14199,'
        ' sgl-project/sglang#27588',
        'gate and up had global scales of their own, where one was read',
        (
            'policy_test.py::QuantizeParamsTest'
            '::test_report_a3_shared_scale_has_the_known_value',
            'policy_test.py::QuantizeParamsTest'
            '::test_gate_and_up_share_the_global_scale_expert_by_expert',
            'export_test.py::GlobalScaleTest'
            '::test_gate_and_up_of_an_expert_share_the_larger_amax',
            'export_test.py::GlobalScaleTest::test_missing_partner_is_named',
            'bit_exact_test.py::BitExactTest'
            '::test_on_the_fly_weights_equal_quantize_params',
        ),
    ),
    _Fault(
        'A4',
        'huggingface/transformers#48371',
        'experts were read without their global scale',
        (
            'export_test.py::ExportTest'
            '::test_converted_weights_are_those_that_the_sampler_runs',
            'export_test.py::ExportTest'
            '::test_exported_logits_are_those_of_fake_quantized_masters',
            'export_test.py::ExportTest'
            '::test_quantized_weights_change_their_layout_byte_for_byte',
            'interop_test.py::InteropTest'
            '::test_tools_read_the_values_that_we_wrote',
        ),
    ),
    _Fault(
        'A5',
        'modular/modular#6600',
        'a global scale that divides was taken for one that multiplies',
        (
            'quantization_test.py::ReportsTest'
            '::test_a5_global_scale_is_a_decode_scale',
            'export_test.py::GlobalScaleTest::test_row_of_a_half_and_six',
            'export_test.py::GlobalScaleTest'
            '::test_swapped_conventions_are_refused',
            'export_test.py::ExportTest'
            '::test_quantized_weights_change_their_layout_byte_for_byte',
            'models/hf_corruption_test.py::QuantizedTest'
            '::test_a_wrong_global_scale_is_named',
        ),
    ),
    _Fault(
        'A6',
        'huggingface/safetensors#825',
        'arrays that are not contiguous were written as garbage',
        (
            'safetensors_test.py::RoundTripTest::test_any_layout_is_written_right',
        ),
    ),
    _Fault(
        'A7',
        'huggingface/safetensors#682',
        'float8 tensors could not be read into numpy',
        (
            'safetensors_test.py::RoundTripTest'
            '::test_float8_that_the_official_numpy_reader_cannot_load',
            'safetensors_corruption_test.py::HeaderErrorsTest'
            '::test_a_wrong_field_is_refused',
            'quantization_test.py::ReportsTest'
            '::test_a7_scales_are_ml_dtypes_arrays_of_the_same_bytes',
        ),
    ),
    _Fault(
        'A8',
        'vllm-project/vllm#12784, flashinfer-ai/flashinfer#3206',
        'a width that does not fill blocks failed late, or was padded',
        (
            'quantization_test.py::ShapeTest'
            '::test_k_that_is_no_multiple_of_the_block_raises',
            'quantization_properties_test.py::InputTest'
            '::test_shape_is_refused_at_trace_time',
            'quantization_properties_test.py::InputTest'
            '::test_dtype_is_refused',
            'quantization_properties_test.py::InputTest'
            '::test_empty_gives_empty',
            'policy_test.py::QuantizeParamsTest'
            '::test_weight_that_does_not_fit_the_block_is_named',
        ),
    ),
    _Fault(
        'A9',
        'AI-Hypercomputer/maxtext#3868',
        'a key was renamed, and a mixture of experts loaded as a dense model',
        (
            'models/hf_config_test.py::GenerationsTest'
            '::test_both_generations_are_read_alike',
            'models/hf_config_test.py::GenerationsTest'
            '::test_a_missing_number_of_experts_is_no_dense_model',
            'models/hf_test.py::FormsTest'
            '::test_fused_and_single_experts_are_one_model',
            'models/hf_test.py::NamesTest'
            '::test_every_tensor_is_needed_and_named',
            'models/hf_test.py::NamesTest::test_an_extra_tensor_is_named',
        ),
    ),
    _Fault(
        'A10',
        'NVIDIA-NeMo/RL#4161',
        'equal rewards had a deviation by rounding, and so an advantage',
        (
            'rl/advantages_test.py::ComputeTest'
            '::test_report_a10_equal_rewards_give_exactly_zero',
            'rl/advantages_test.py::ComputeTest'
            '::test_report_a10_leave_one_out_is_not_blown_up',
            'rl/advantages_test.py::GroupRelativeTest'
            '::test_equal_rewards_have_gradient_zero',
            'rl/advantages_test.py::GroupsTest::test_metrics_by_hand',
            'rl/learner_test.py::TrainStepTest'
            '::test_equal_rewards_change_no_bit',
        ),
    ),
    _Fault(
        'A11',
        'bingreeky/MemGen#33, huggingface/trl#6369, huggingface/trl#6439',
        'what fills a row behind its EOS was trained on',
        (
            'sampler_test.py::GenerateTest'
            '::test_rows_hold_prompt_completion_padding_without_gaps',
            'rl/rollouts_test.py::CollectTest'
            '::test_truncated_completions_may_be_masked',
            'rl/policy_loss_test.py::AggregateTest'
            '::test_report_a11_truncated_rows_may_leave_numerator_and'
            '_denominator',
            'rl/learner_test.py::TrainStepTest'
            '::test_what_is_masked_changes_no_bit',
            'rl/learner_test.py::TrainStepTest'
            '::test_an_empty_mask_changes_no_bit',
        ),
    ),
    _Fault(
        'A12',
        'radixark/miles#1363, OpenRLHF/OpenRLHF#1293, google/tunix#2310',
        'the exponential of a log-ratio overflowed, under the mask too',
        (
            'rl/losses_test.py::SurrogateTest'
            '::test_report_a12_ratios_are_held_and_counted',
            'rl/ratios_test.py::KlPenaltyTest'
            '::test_extreme_ratios_stay_finite',
            'rl/corrections_test.py::CorrectTest'
            '::test_extreme_ratios_and_empty_batches',
        ),
    ),
    _Fault(
        'A13',
        'google/tunix#2288, google/tunix#2290, verl-project/verl#3457',
        'a run that was resumed went on with other data',
        (
            'experiments/grpo_test.py::GrpoTest'
            '::test_report_a13_resuming_changes_no_prompt_key_or_loss',
            'experiments/grpo_test.py::GrpoTest'
            '::test_interrupted_run_goes_on_as_if_it_had_not_been',
            'experiments/grpo_test.py::GrpoTest::test_changed_data_is_refused',
            'tasks/records_test.py::OrderTest'
            '::test_an_epoch_holds_every_problem_once_in_an_order_of_its_own',
        ),
    ),
    _Fault(
        'A14',
        'NVIDIA/TransformerEngine#2931, radixark/miles#1054',
        'the bytes of a token depended on the tokens beside it',
        (
            'quantization_test.py::TokenTest::test_token_is_independent_of_batch',
            'quantization_properties_test.py::ReportA14Test'
            '::test_row_is_the_same_however_it_is_quantized',
            'quantization_properties_test.py::ReportA14Test'
            '::test_row_is_the_same_under_shard_map',
        ),
    ),
    _Fault(
        3,
        'google/tunix#2096',
        'the first rollouts came from weights that were never set',
        (
            'experiments/grpo_test.py::GrpoTest'
            '::test_learner_and_sampler_agree_bit_for_bit_in_every_row',
            'rl/rollouts_test.py::CollectTest'
            '::test_rows_of_a_problem_are_a_group',  # with their version
        ),
    ),
    _Fault(
        9,
        'NVIDIA-NeMo/RL#3882, verl-project/verl#3238, rllm-org/rllm#776',
        'groups were told by the text of their prompts',
        (
            'rl/rollouts_test.py::CollectTest'
            '::test_rows_of_a_problem_are_a_group',  # of equal prompts
            'rl/advantages_test.py::GroupsTest'
            '::test_one_answer_under_two_ids_stays_two_groups',
        ),
    ),
    _Fault(
        10,
        'radixark/miles#2378',
        'a sample of several trajectories counted once for each of them',
        reason='a completion is one trajectory; there are no several turns yet',
    ),
    _Fault(
        12,
        'huggingface/trl#5224, NovaSky-AI/SkyRL#123, sgl-project/sglang#26555',
        'text was encoded again, and other ids trained than were sampled',
        (
            'rl/text_tasks_test.py::TokenTaskTest'
            '::test_report_12_what_is_trained_are_the_ids_that_were_sampled',
        ),
    ),
    _Fault(
        13,
        'huggingface/trl#6266',
        'log-probs that the sampler did not give made the loss NaN',
        (
            'rl/corrections_test.py::CorrectTest'
            '::test_report_13_missing_log_probs_are_neutral_and_counted',
            'rl/metrics_test.py::MismatchTest'
            '::test_report_13_missing_log_probs_are_left_out_and_counted',
            'rl/learner_test.py::CorrectionTest'
            '::test_a_token_without_sampler_log_prob_has_weight_one',
        ),
    ),
    _Fault(
        16,
        'flashinfer-ai/flashinfer#3448',
        'a row of zeros got scales that are NaN',
        (
            'quantization_test.py::ZeroTest::test_zero_row_is_zero_beside_others',
            'golden_test.py::QuantizeTest'
            '::test_gives_the_bytes_of_the_reference',
        ),
    ),
    _Fault(
        17,
        'flashinfer-ai/flashinfer#3398',
        'outputs 25 times too small passed tests of the cosine alone',
        (
            'matmul_test.py::QuantizedMatmulTest'
            '::test_error_against_float64_is_the_rounding_of_the_result',
            'matmul_test.py::QuantizedMatmulTest'
            '::test_forward_is_dot_of_decoded_operands_times_outer_scales',
            'quantization_properties_test.py::PropertiesTest'
            '::test_error_is_bounded_by_the_amax_of_the_block',
        ),
    ),
    _Fault(
        18,
        'NVIDIA/TransformerEngine#3281',
        'stochastic rounding gave zeros where the device has none',
        (
            'quantization_properties_test.py::StochasticTest'
            '::test_is_unbiased_within_four_sigma',
            'quantization_properties_test.py::StochasticTest'
            '::test_values_are_the_neighbours_on_the_grid',
        ),
    ),
    _Fault(
        20,
        'NVIDIA/TransformerEngine#3045',
        'ragged numbers of tokens and experts without any were refused',
        (
            'matmul_test.py::GroupedMatmulTest::test_equals_a_loop_over_groups',
            'matmul_test.py::GroupedMatmulTest'
            '::test_all_groups_empty_gives_zeros',
            'matmul_formats_test.py::QuantizedBackwardTest'
            '::test_grouped_equals_a_loop_over_groups',
        ),
    ),
    _Fault(
        21,
        'vllm-project/vllm#50029, NVIDIA/Model-Optimizer#2276',
        'the global scales of experts were rounded, or one taken for all',
        (
            'policy_test.py::QuantizeParamsTest'
            '::test_gate_and_up_share_the_global_scale_expert_by_expert',
            'matmul_test.py::GroupedMatmulTest::test_equals_a_loop_over_groups',
            'export_test.py::ExportTest'
            '::test_converted_weights_are_those_that_the_sampler_runs',
        ),
    ),
    _Fault(
        22,
        'vllm-project/vllm#34577',
        'tiny scales became zero in bfloat16',
        (
            'qtensor_test.py::DequantizeTest'
            '::test_report_22_tiny_scales_do_not_underflow',
            'qtensor_test.py::DequantizeTest'
            '::test_is_code_times_rounded_scale',
        ),
    ),
    _Fault(
        23,
        'radixark/miles#1261',
        'equal formulas of the 4/6 error chose differently near a tie',
        (
            'golden_test.py::QuantizeTest'
            '::test_gives_the_bytes_of_the_reference',
            'golden_formats_test.py::Nvfp4Test'
            '::test_equals_flashinfer_per_token_with_four_over_six',
            'quantization_test.py::OracleTest'
            '::test_equals_numpy_with_four_over_six',
            'quantization_test.py::ZeroTest'
            '::test_zero_block_beside_a_one_is_exact',  # a tie goes to six
        ),
    ),
    _Fault(
        24,
        'NVIDIA-NeMo/RL#3615',
        'conversion and live update left different weights in bfloat16',
        (
            'bit_exact_test.py::ArrowsTest'
            '::test_weights_have_the_same_bytes_everywhere',
            'export_test.py::ExportTest'
            '::test_live_export_is_a_fresh_conversion_after_every_update',
        ),
    ),
    _Fault(
        25,
        'radixark/miles#3277',
        'experts were chosen anew and paired with old log-probs',
        (
            'rl/rollouts_test.py::CollectTest'
            '::test_report_25_experts_stay_with_the_tokens_they_were_chosen'
            '_for',
            'replay_test.py::ReplayTest'
            '::test_replayed_logprobs_are_the_samplers',
            'replay_test.py::ReplayTest'
            '::test_every_token_that_was_run_has_its_experts',
        ),
    ),
    _Fault(
        28,
        'NVIDIA-NeMo/RL#3238',
        'one sample that did not end kept its group waiting for ever',
        (
            'tasks/rewards_test.py::TimeoutTest'
            '::test_a_hanging_reward_times_out_and_the_rest_goes_on',
            'rl/rollouts_test.py::CollectTest'
            '::test_a_failed_reward_leaves_its_group',
        ),
    ),
    _Fault(
        29,
        'allenai/open-instruct#1627, tenstorrent/tt-metal#49504',
        'weights were synced by the number of the step, or when it was logged',
        (
            'experiments/grpo_test.py::GrpoTest'
            '::test_learner_and_sampler_agree_bit_for_bit_in_every_row',
            'experiments/grpo_test.py::GrpoTest'
            '::test_interrupted_run_goes_on_as_if_it_had_not_been',
        ),
    ),
    _Fault(
        30,
        'marin-community/marin#1829',
        'a trainer that was restarted served the weights of its start',
        (
            'experiments/grpo_test.py::GrpoTest'
            '::test_interrupted_run_goes_on_as_if_it_had_not_been',
            'checkpoint_test.py::StepsTest'
            '::test_a_step_that_is_not_above_the_last_raises',
        ),
    ),
    _Fault(
        31,
        'huggingface/trl#2708, unslothai/unsloth-zoo#840',
        'log-probs changed with the padding',
        (
            'bit_exact_test.py::BitExactTest'
            '::test_logprobs_do_not_depend_on_batch_size_or_padding',
            'sampler_test.py::GenerateTest'
            '::test_rows_hold_prompt_completion_padding_without_gaps',
            'rl/policy_loss_test.py::AggregateTest'
            '::test_padding_changes_nothing',
        ),
    ),
    _Fault(
        32,
        'PrimeIntellect-ai/prime-rl#1525',
        'log-probs of learner and sampler were one token apart',
        (
            'sampler_test.py::GenerateTest'
            '::test_logprobs_are_those_of_the_sampling_distribution',
            'bit_exact_test.py::BitExactTest::test_learner_equals_sampler',
            'rl/learner_test.py::LogprobsTest'
            '::test_is_a_distribution_over_the_next_token',
        ),
    ),
    _Fault(
        33,
        'NVIDIA-NeMo/RL#3792',
        'a setting did nothing, and nobody was told',
        (
            'experiments/grpo_test.py::GrpoTest'
            '::test_report_33_every_setting_is_read',
            'experiments/grpo_test.py::GrpoTest'
            '::test_flags_that_do_not_fit_are_refused',
            'config_test.py::StrictnessTest'
            '::test_an_unknown_field_raises_and_lists_all',
            'rl/policy_loss_test.py::LossConfigTest::test_bad_configs_raise',
            'rl/corrections_test.py::CorrectTest::test_bad_configs_raise',
            'rl/advantages_test.py::ComputeTest::test_bad_configs_raise',
            'tasks/text_test.py::TaskConfigTest'
            '::test_an_unused_field_raises_and_is_named',
            'quantization_properties_test.py::InputTest'
            '::test_option_that_the_format_does_not_have_is_refused',
            'matmul_formats_test.py::RefusedTest'
            '::test_pairs_that_make_no_sense',
            'policy_test.py::RulesTest'
            '::test_required_rule_that_matches_nothing_is_an_error',
        ),
    ),
    _Fault(
        34,
        'NVIDIA-NeMo/RL#1801, NVIDIA-NeMo/RL#4243, NVIDIA-NeMo/RL#1330',
        'sampler and learner drifted apart unseen',
        (
            'experiments/grpo_test.py::WarningsTest'
            '::test_report_34_mismatch_that_grows_is_said_once',
            'rl/metrics_test.py::MismatchTest::test_by_hand',
        ),
    ),
    _Fault(
        35,
        'radixark/miles#3232, NVIDIA-NeMo/RL#869',
        'adapters were added once for every shard; RoPE differed by side',
        (  # There are no adapters.
            'models/hf_test.py::TransformersTest'
            '::test_float32_logits_are_those_of_transformers',
            'models/hf_config_test.py::RopeTest'
            '::test_frequencies_of_llama3_are_those_of_its_formula',
            'bit_exact_test.py::BitExactTest::test_learner_equals_sampler',
        ),
    ),
    _Fault(
        36,
        'sgl-project/sglang#25733',
        'a scale that is no power of two was packed into an exponent',
        (
            'golden_formats_test.py::ConversionTest'
            '::test_scalar_conversions_equal_cuda',
            'golden_formats_test.py::ConversionTest'
            '::test_e8m0_of_a_block_amax_equals_transformer_engine',
        ),
    ),
)


class ReportedFaultsTest(parameterized.TestCase):

  def test_every_report_is_there_once(self):
    numbers = [fault.number for fault in _FAULTS]
    self.assertSequenceEqual(numbers, (*_REPORTS, *_NUMBERS))

  @parameterized.parameters(*((fault,) for fault in _FAULTS))
  def test_there_are_tests_or_a_reason(self, fault):
    self.assertTrue(fault.where)
    self.assertTrue(fault.what)
    self.assertNotEqual(bool(fault.tests), bool(fault.reason))
    self.assertLen(set(fault.tests), len(fault.tests))

  @parameterized.parameters(
      *sorted({test for fault in _FAULTS for test in fault.tests})
  )
  def test_test_is_there_and_runs_by_default(self, test):
    file, name, method = test.split('::')
    self.assertIn((name, method), _tests_of(file))


@functools.cache
def _tests_of(file):
  """Returns (class, method) of the tests of a file that run by default."""
  tree = ast.parse((_TESTS / file).read_text())
  return {
      (node.name, item.name)
      for node in tree.body
      if isinstance(node, ast.ClassDef) and not _is_marked(node)
      for item in node.body
      if isinstance(item, ast.FunctionDef)
      and item.name.startswith('test')
      and not _is_marked(item)
  }


def _is_marked(node):
  """Returns whether a class or a function has a mark of pytest, as `slow`."""
  marks = {ast.unparse(decorator) for decorator in node.decorator_list}
  marks.discard('pytest.mark.quick_compile')  # runs by default
  return any(mark.startswith('pytest.mark') for mark in marks)


if __name__ == '__main__':
  absltest.main()
