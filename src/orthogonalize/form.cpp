#include <algorithm>

#include <c10/util/Exception.h>

#include "orthogonalize/iteration.h"

namespace muon {

Form choose_form(
    c10::DeviceType device, c10::ScalarType compute_dtype, std::int64_t n, std::int64_t m,
    std::int64_t steps) {
  const bool is_wide_float =
      compute_dtype == c10::ScalarType::Float || compute_dtype == c10::ScalarType::Double;
  if (device != c10::DeviceType::CPU || !is_wide_float || steps < 3) {
    return Form::Standard;
  }
  // In units of n^3 with symmetric products and 5 steps: 15m/n + 5 in standard
  // form, 14 + 6m/n with one restart. Without restart 17 + 3m/n, but errors grow
  // with every step and so the square matrices are float64: left to those who ask.
  return 2 * m >= 3 * n ? Form::GramXRestart : Form::Standard;
}

namespace detail {

std::vector<std::size_t> run_lengths(Form form, std::size_t steps) {
  std::vector<std::size_t> lengths;
  std::size_t longest = form == Form::Standard ? 1 : form == Form::GramXRestart ? 2 : 5;
  for (std::size_t done = 0; done < steps; done += lengths.back()) {
    lengths.push_back(std::min(longest, steps - done));
    longest = form == Form::GramXRestart ? 3 : longest;
  }
  return lengths;
}

c10::ScalarType workspace_dtype(const Iteration& iteration, bool is_complex) {
  const c10::ScalarType real = iteration.product_dtype == c10::ScalarType::Double
      ? c10::ScalarType::Double
      : c10::ScalarType::Float;
  return is_complex ? c10::toComplexType(real) : real;
}

Iteration make_iteration(const OrthogonalizeOptions& options, c10::ScalarType dtype) {
  Iteration iteration;
  iteration.coefficients = options.schedule.take(options.steps);
  iteration.normalization = options.schedule.normalization;
  iteration.norm_factor = options.schedule.norm_factor;
  iteration.form = options.form;
  const bool is_double = c10::toRealValueType(dtype) == c10::ScalarType::Double;
  iteration.product_dtype =
      options.compute_dtype.value_or(is_double ? c10::ScalarType::Double : c10::ScalarType::Float);
  const bool is_half = iteration.product_dtype == c10::ScalarType::Half ||
      iteration.product_dtype == c10::ScalarType::BFloat16;
  TORCH_CHECK_VALUE(
      !is_half || options.form != Form::Gram,
      "muon: expected form \"standard\" or \"gram_x_restart\" with a 16-bit compute_dtype, got \"gram\"; the "
      "form without restart needs float32 or float64");
  TORCH_CHECK_VALUE(
      iteration.product_dtype != c10::ScalarType::BFloat16 || options.form != Form::GramXRestart,
      "muon: expected compute_dtype float16, float32 or float64 with form \"gram_x_restart\", got bfloat16, "
      "whose 8 bits are too few for the accumulated product");
  TORCH_CHECK_VALUE(
      !c10::isComplexType(dtype) || !is_half,
      "muon: expected compute_dtype \"auto\", float32 or float64 for complex matrices, got ",
      iteration.product_dtype);
  return iteration;
}

} // namespace detail
} // namespace muon
