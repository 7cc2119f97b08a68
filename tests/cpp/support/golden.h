#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <nlohmann/json.hpp>

#include <muon/optimizer.h>
#include <muon/step.h>

namespace muon::testing {

using Json = nlohmann::json;

/// One case of tests/golden with the precision in which it is to be run.
struct GoldenCase {
  std::string name;
  Json options;
  Json inputs;
  Json expected;
  Json tolerance; ///< quantity -> largest absolute difference, for `dtype`
  c10::ScalarType dtype = c10::ScalarType::Double;
};

void PrintTo(const GoldenCase& golden, std::ostream* out);

/// All cases of a file, once in float64 and once in float32.
std::vector<GoldenCase> golden_cases(const std::string& file);

/// The case's name and dtype as a test name.
std::string test_name(const GoldenCase& golden);

/// A tensor of the case in the case's dtype.
at::Tensor tensor(const GoldenCase& golden, const Json& encoded);

/// Fails the test if `got` is further from `encoded` than the case allows for `quantity`.
void expect_within(
    const GoldenCase& golden, const at::Tensor& got, const Json& encoded,
    const std::string& quantity, const std::string& where);

/// How the options of a case are said to libmuon: the one place that knows.
OrthogonalizeOptions orthogonalize_options(const Json& ortho);
GroupSpec muon_spec(const Json& muon, std::int64_t ndim);
GroupSpec adamw_spec();

/// The group's row of the hyperparameter tensor, [Hyper::kCount] in float64.
at::Tensor muon_hyper(const Json& muon);
at::Tensor adamw_hyper(const Json& adamw);

/// The same for a group of `muon::Muon`.
MuonOptions muon_options(const Json& muon, std::int64_t ndim);
MuonOptions adamw_options(const Json& adamw);

/// Whether libmuon has the case's rules; muonium's own rule for the blocks of a split weight is
/// the exception, `muonium_fixed` and `normuon_fixed` are what libmuon does instead.
bool is_supported(const Json& muon);

} // namespace muon::testing
