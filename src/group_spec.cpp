#include <algorithm>
#include <charconv>
#include <sstream>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <muon/step.h>

#include "option_names.h"

namespace muon {
namespace {

using namespace detail; // NOLINT(google-build-using-namespace): the option tables

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
  }
  return parts;
}

template <typename Number>
Number to_number(std::string_view key, std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TORCH_CHECK_VALUE(
      error == std::errc{} && end == text.data() + text.size(), "muon: expected a number for ", key,
      ", got \"", text, "\"");
  return value;
}

template <typename Number>
std::vector<Number> to_numbers(std::string_view key, std::string_view text) {
  std::vector<Number> numbers;
  for (const std::string_view part : split(text, ',')) {
    numbers.push_back(to_number<Number>(key, part));
  }
  return numbers;
}

Schedule parse_coefficients(std::string_view text) {
  const std::vector<double> numbers = to_numbers<double>("coefficients", text);
  TORCH_CHECK_VALUE(
      numbers.size() % 3 == 0, "muon: expected coefficients in triples, got ", numbers.size(),
      " numbers");
  std::vector<Coefficients> rows;
  for (std::size_t i = 0; i < numbers.size(); i += 3) {
    rows.push_back({numbers[i], numbers[i + 1], numbers[i + 2]});
  }
  return Schedule::custom(std::move(rows));
}

void set_layout(MatrixLayout& layout, std::string_view key, std::string_view value) {
  if (key == "rows") {
    layout.rows = to_numbers<std::int64_t>(key, value);
  } else if (key == "cols") {
    layout.cols = to_numbers<std::int64_t>(key, value);
  } else if (key == "split_sizes") {
    layout.split_sizes = to_numbers<std::int64_t>(key, value);
  } else if (key == "flatten") {
    layout.flatten = from_name(kFlag, key, value);
  } else if (key == "complex_dim") {
    layout.complex_dim = from_name(kFlag, key, value);
  } else if (key == "batch_dims") {
    layout.batch_dims = to_number<std::int64_t>(key, value);
  } else if (key == "num_heads") {
    layout.num_heads = to_number<std::int64_t>(key, value);
  } else if (key == "split_dim") {
    layout.split_dim = to_number<std::int64_t>(key, value);
  } else {
    TORCH_CHECK_VALUE(false, "muon: unknown key \"", key, "\" in a group spec");
  }
}

void set_option(GroupSpec& spec, std::string_view key, std::string_view value) {
  if (key == "algorithm") {
    spec.algorithm = std::string(value);
  } else if (key == "adjust_lr") {
    spec.adjust_lr = from_name(kAdjustLr, key, value);
  } else if (key == "schedule") {
    spec.orthogonalize.schedule = find_schedule(value);
  } else if (key == "coefficients") {
    spec.orthogonalize.schedule = parse_coefficients(value);
  } else if (key == "steps") {
    spec.orthogonalize.steps = to_number<std::int64_t>(key, value);
  } else if (key == "compute_dtype") {
    spec.orthogonalize.compute_dtype = from_name(kComputeDtype, key, value);
  } else if (key == "form") {
    spec.orthogonalize.form = from_name(kForm, key, value);
  } else if (key == "batch_size") {
    spec.batch_size = to_number<std::int64_t>(key, value);
  } else if (key == "nonfinite") {
    spec.nonfinite = from_name(kNonFinite, key, value);
  } else if (key == "amsgrad") {
    spec.amsgrad = from_name(kFlag, key, value);
  } else if (key == "decoupled") {
    spec.decoupled = from_name(kFlag, key, value);
  } else if (key == "state_format") {
    spec.state_format = from_name(kStateFormat, key, value);
  } else if (key == "stochastic_rounding") {
    spec.stochastic_rounding = from_name(kFlag, key, value);
  } else if (key == "split_master") {
    spec.split_master = from_name(kFlag, key, value);
  } else if (key == "offload") {
    spec.offload = from_name(kFlag, key, value);
  } else {
    set_layout(spec.layout, key, value);
  }
}

std::string shortest(double value) {
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return {buffer, result.ptr};
}

void write_layout(std::ostream& out, const MatrixLayout& layout) {
  const auto write_list = [&](const char* key, const std::vector<std::int64_t>& values) {
    if (!values.empty()) {
      out << ';' << key << '=' << c10::Join(",", values);
    }
  };
  write_list("rows", layout.rows);
  write_list("cols", layout.cols);
  write_list("split_sizes", layout.split_sizes);
  out << ";flatten=" << layout.flatten << ";batch_dims=" << layout.batch_dims
      << ";complex_dim=" << layout.complex_dim << ";num_heads=" << layout.num_heads
      << ";split_dim=" << layout.split_dim;
}

bool is_named(const Schedule& schedule) {
  const std::vector<std::string> names = schedule_names();
  return std::find(names.begin(), names.end(), schedule.name) != names.end() &&
      find_schedule(schedule.name).coefficients == schedule.coefficients;
}

void write_orthogonalize(std::ostream& out, const OrthogonalizeOptions& options) {
  const Schedule& schedule = options.schedule;
  if (!is_named(schedule)) {
    std::vector<std::string> numbers;
    for (const Coefficients& row : schedule.coefficients) {
      for (const double value : row) {
        numbers.push_back(shortest(value));
      }
    }
    out << ";coefficients=" << c10::Join(",", numbers);
  } else {
    out << ";schedule=" << schedule.name;
  }
  out << ";normalization=" << to_name(kNormalization, schedule.normalization)
      << ";norm_factor=" << shortest(schedule.norm_factor);
  if (options.steps) {
    out << ";steps=" << *options.steps;
  }
  out << ";compute_dtype=" << to_name(kComputeDtype, options.compute_dtype)
      << ";form=" << to_name(kForm, options.form);
}

} // namespace

GroupSpec parse_group_spec(std::string_view text) {
  GroupSpec spec;
  std::optional<std::string_view> normalization;
  std::optional<std::string_view> norm_factor;
  for (const std::string_view entry : split(text, ';')) {
    const std::size_t equals = entry.find('=');
    TORCH_CHECK_VALUE(
        equals != std::string_view::npos, "muon: expected key=value in a group spec, got \"", entry,
        "\"");
    const std::string_view key = entry.substr(0, equals);
    const std::string_view value = entry.substr(equals + 1);
    if (key == "normalization") {
      normalization = value;
    } else if (key == "norm_factor") {
      norm_factor = value;
    } else {
      set_option(spec, key, value);
    }
  }
  // After the schedule, whichever came first.
  if (normalization) {
    spec.orthogonalize.schedule.normalization =
        from_name(kNormalization, "normalization", *normalization);
  }
  if (norm_factor) {
    spec.orthogonalize.schedule.norm_factor = to_number<double>("norm_factor", *norm_factor);
  }
  return spec;
}

std::string to_string(const GroupSpec& spec) {
  std::ostringstream out;
  out << "algorithm=" << spec.algorithm;
  write_layout(out, spec.layout);
  out << ";adjust_lr=" << to_name(kAdjustLr, spec.adjust_lr);
  write_orthogonalize(out, spec.orthogonalize);
  out << ";batch_size=" << spec.batch_size << ";nonfinite=" << to_name(kNonFinite, spec.nonfinite)
      << ";amsgrad=" << spec.amsgrad << ";decoupled=" << spec.decoupled
      << ";state_format=" << to_name(kStateFormat, spec.state_format)
      << ";stochastic_rounding=" << spec.stochastic_rounding
      << ";split_master=" << spec.split_master << ";offload=" << spec.offload;
  return out.str();
}

} // namespace muon
