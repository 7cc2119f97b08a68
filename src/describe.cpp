// What an optimizer does with every parameter, as a table.

#include <algorithm>
#include <array>
#include <cstdio>
#include <tuple>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <muon/optimizer.h>

#include "group_checks.h"
#include "param_state.h"

namespace muon {
namespace {

using Row = std::array<std::string, 8>;

constexpr const char* kColumnGap = "  ";

// Each value once, in order of first appearance.
std::string unique_numbers(const std::vector<double>& values) {
  std::vector<std::string> texts;
  for (const double value : values) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.4g", value);
    if (std::find(texts.begin(), texts.end(), text.data()) == texts.end()) {
      texts.emplace_back(text.data());
    }
  }
  return c10::Join(", ", texts);
}

std::string with_separators(std::int64_t number) {
  std::string text = std::to_string(number);
  for (std::size_t end = text.size(); end > 3; end -= 3) {
    text.insert(end - 3, ",");
  }
  return text;
}

// The shape factor of each block; 1 for elementwise algorithms.
std::vector<double> shape_factors(
    const MuonOptions& options, const at::Tensor& param, const std::string& name) {
  if (detail::is_elementwise(options)) {
    return {1.0};
  }
  std::vector<double> factors;
  for (const MatrixShape& shape : matrix_shapes(param.sizes(), options.layout(), name)) {
    factors.push_back(shape_factor(options.adjust_lr(), shape.rows, shape.cols));
  }
  return factors;
}

std::vector<double> effective_lrs(
    const MuonOptions& options, const at::Tensor& param, const std::string& name) {
  std::vector<double> values = shape_factors(options, param, name);
  for (double& value : values) {
    value *= options.lr() * options.lr_multiplier();
  }
  return values;
}

// "64x32", "8 of 64x32" or "4 of 64x32 + 2 of 16x32".
std::string matrices(const MuonOptions& options, const at::Tensor& param, const std::string& name) {
  if (detail::is_elementwise(options)) {
    return "-";
  }
  std::vector<MatrixShape> kinds;
  for (const MatrixShape& shape : matrix_shapes(param.sizes(), options.layout(), name)) {
    const auto same = std::find_if(kinds.begin(), kinds.end(), [&](const MatrixShape& kind) {
      return kind.rows == shape.rows && kind.cols == shape.cols;
    });
    if (same == kinds.end()) {
      kinds.push_back(shape);
    } else {
      same->batch += shape.batch;
    }
  }
  std::vector<std::string> texts;
  for (const MatrixShape& kind : kinds) {
    const std::string count = kind.batch == 1 ? "" : c10::str(kind.batch, " of ");
    texts.push_back(c10::str(count, kind.rows, "x", kind.cols));
  }
  return c10::Join(" + ", texts);
}

Row describe_param(
    const MuonOptions& options, const at::Tensor& param, const std::string& name,
    const std::string& why) {
  const std::vector<double> lrs = effective_lrs(options, param, name);
  std::vector<double> decays;
  for (const double lr : lrs) {
    const double base = options.decay_lr() == DecayLr::Adjusted ? lr : options.lr();
    decays.push_back(base * options.weight_decay());
  }
  return {
      name,
      param.dim() == 0 ? "scalar" : c10::Join("x", param.sizes()),
      matrices(options, param, name),
      options.algorithm() + (detail::takes_part(param) ? "" : " (frozen)"),
      why,
      unique_numbers(lrs),
      unique_numbers(decays),
      unique_numbers(shape_factors(options, param, name))};
}

std::string align(const std::vector<Row>& rows) {
  std::array<std::size_t, std::tuple_size_v<Row>> widths{};
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::vector<std::string> lines;
  std::size_t longest = 0;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += row[i] + std::string(widths[i] - row[i].size(), ' ') + kColumnGap;
    }
    line.resize(line.find_last_not_of(' ') + 1);
    longest = std::max(longest, line.size());
    lines.push_back(std::move(line));
  }
  lines.insert(lines.begin() + 1, std::string(longest, '-'));
  return c10::Join("\n", lines);
}

} // namespace

std::vector<double> Muon::effective_lr(const at::Tensor& param) const {
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    const std::vector<at::Tensor>& params = param_groups_[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (params[i].is_same(param)) {
        return effective_lrs(options(g), param, detail::param_label(options(g), g, i));
      }
    }
  }
  TORCH_CHECK_VALUE(
      false, "muon: expected a parameter of this optimizer, got a tensor of shape ", param.sizes());
}

std::string Muon::describe() const {
  struct Total {
    std::string kind;
    std::int64_t params = 0;
    std::int64_t elements = 0;
  };
  std::vector<Row> rows{{"name", "shape", "matrices", "algorithm", "why", "lr", "lr*wd", "factor"}};
  std::vector<Total> totals; // in order of first appearance
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    const std::vector<at::Tensor>& params = param_groups_[g].params();
    const std::vector<std::string>& reasons = options(g).reasons();
    for (std::size_t i = 0; i < params.size(); ++i) {
      rows.push_back(describe_param(
          options(g), params[i], detail::param_label(options(g), g, i),
          i < reasons.size() ? reasons[i] : ""));
      const std::string kind = detail::takes_part(params[i]) ? options(g).algorithm() : "frozen";
      auto total = std::find_if(
          totals.begin(), totals.end(), [&](const Total& known) { return known.kind == kind; });
      if (total == totals.end()) {
        total = totals.insert(totals.end(), {kind});
      }
      ++total->params;
      total->elements += params[i].numel();
    }
  }
  std::string text = align(rows) + "\n";
  for (const Total& total : totals) {
    text += c10::str(
        "\n", total.kind, ": ", total.params, total.params == 1 ? " parameter, " : " parameters, ",
        with_separators(total.elements), " elements");
  }
  return text;
}

} // namespace muon
