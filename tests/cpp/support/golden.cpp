#include "support/golden.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <ostream>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace muon::testing {

void PrintTo(const GoldenCase& golden, std::ostream* out) {
  *out << golden.name << " in " << golden.dtype;
}

std::vector<GoldenCase> golden_cases(const std::string& file) {
  std::ifstream stream(std::string(MUON_GOLDEN_DIR) + "/" + file);
  const Json array = Json::parse(stream);
  std::vector<GoldenCase> cases;
  for (const Json& json : array) {
    for (const auto& [precision, dtype] : {std::pair{"fp64", at::kDouble}, {"fp32", at::kFloat}}) {
      cases.push_back(
          {json.at("name"), json.at("options"), json.at("inputs"), json.at("expected"),
           json.at("tolerance").at(precision), dtype});
    }
  }
  return cases;
}

std::string test_name(const GoldenCase& golden) {
  std::string name = golden.name + (golden.dtype == at::kDouble ? "_fp64" : "_fp32");
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

at::Tensor tensor(const GoldenCase& golden, const Json& encoded) {
  const auto data = encoded.at("data").get<std::vector<double>>();
  const auto shape = encoded.at("shape").get<std::vector<std::int64_t>>();
  return at::tensor(data, at::kDouble).reshape(shape).to(golden.dtype);
}

void expect_within(
    const GoldenCase& golden, const at::Tensor& got, const Json& encoded,
    const std::string& quantity, const std::string& where) {
  GoldenCase exact = golden;
  exact.dtype = at::kDouble;
  const at::Tensor expected = tensor(exact, encoded);
  ASSERT_EQ(got.sizes(), expected.sizes()) << golden.name << ": " << quantity << " " << where;
  const double error = (got.to(at::kDouble) - expected).abs().max().item<double>();
  const auto bound = golden.tolerance.at(quantity).get<double>();
  EXPECT_TRUE(error <= bound) << golden.name << ": " << quantity << " " << where << " is off by "
                              << error << ", allowed " << bound;
}

OrthogonalizeOptions orthogonalize_options(const Json& ortho) {
  OrthogonalizeOptions options;
  const auto rows = ortho.at("coefficients").get<std::vector<Coefficients>>();
  if (!rows.empty()) {
    options.schedule = Schedule::custom(rows);
  }
  options.schedule.normalization =
      ortho.at("norm") == "add" ? Normalization::Add : Normalization::Clamp;
  options.schedule.norm_factor = ortho.at("norm_factor");
  options.steps = static_cast<std::int64_t>(rows.size());
  options.eps = ortho.at("eps");
  return options;
}

GroupSpec muon_spec(const Json& muon, std::int64_t ndim) {
  GroupSpec spec;
  spec.algorithm = muon.at("normuon_beta2").is_null() ? "muon" : "normuon";
  if (ndim > 2 && muon.at("flatten")) {
    spec.layout.flatten = true;
  } else if (ndim > 2) {
    spec.layout.batch_dims = ndim - 2;
  }
  if (!muon.at("split_sizes").is_null()) {
    spec.layout.split_sizes = muon.at("split_sizes").get<std::vector<std::int64_t>>();
  }
  const std::string scale = muon.at("scale");
  spec.adjust_lr = scale == "original" ? AdjustLr::Original
      : scale == "match_rms_adamw"     ? AdjustLr::MatchRmsAdamw
                                       : AdjustLr::SpectralUnclamped;
  spec.orthogonalize = orthogonalize_options(muon.at("ortho"));
  return spec;
}

GroupSpec adamw_spec() {
  GroupSpec spec;
  spec.algorithm = "adamw";
  return spec;
}

at::Tensor muon_hyper(const Json& muon) {
  at::Tensor row = at::zeros({Hyper::kCount}, at::kDouble);
  auto* hyper = row.mutable_data_ptr<double>();
  hyper[Hyper::kLr] = muon.at("lr");
  hyper[Hyper::kWeightDecay] = muon.at("weight_decay");
  hyper[Hyper::kMomentum] = muon.at("momentum");
  hyper[Hyper::kEps] = muon.at("ortho").at("eps");
  hyper[Hyper::kLrMultiplier] = 1.0;
  hyper[Hyper::kMuonBeta2] =
      muon.at("normuon_beta2").is_null() ? 0.0 : muon.at("normuon_beta2").get<double>();
  hyper[Hyper::kNesterov] = muon.at("nesterov").get<bool>() ? 1.0 : 0.0;
  hyper[Hyper::kMaximize] = muon.at("maximize").get<bool>() ? 1.0 : 0.0;
  hyper[Hyper::kCautious] = muon.at("decay") == "cautious" ? 1.0 : 0.0;
  hyper[Hyper::kHeavyBall] = muon.at("momentum_form") == "heavy_ball" ? 1.0 : 0.0;
  hyper[Hyper::kDecayAdjusted] = muon.at("decay_lr") == "lr*scale" ? 1.0 : 0.0;
  return row;
}

at::Tensor adamw_hyper(const Json& adamw) {
  at::Tensor row = at::zeros({Hyper::kCount}, at::kDouble);
  auto* hyper = row.mutable_data_ptr<double>();
  hyper[Hyper::kLr] = adamw.at("lr");
  hyper[Hyper::kWeightDecay] = adamw.at("weight_decay");
  hyper[Hyper::kEps] = adamw.at("eps");
  hyper[Hyper::kLrMultiplier] = 1.0;
  hyper[Hyper::kBeta1] = adamw.at("betas").at(0);
  hyper[Hyper::kBeta2] = adamw.at("betas").at(1);
  return row;
}

MuonOptions muon_options(const Json& muon, std::int64_t ndim) {
  const GroupSpec spec = muon_spec(muon, ndim);
  MuonOptions options(muon.at("lr").get<double>());
  options.weight_decay(muon.at("weight_decay"))
      .momentum(muon.at("momentum"))
      .nesterov(muon.at("nesterov"))
      .maximize(muon.at("maximize"))
      .cautious(muon.at("decay") == "cautious")
      .eps(muon.at("ortho").at("eps"))
      .algorithm(spec.algorithm)
      .layout(spec.layout)
      .adjust_lr(spec.adjust_lr)
      .schedule(spec.orthogonalize.schedule)
      .ns_steps(spec.orthogonalize.steps);
  if (muon.at("momentum_form") == "heavy_ball") {
    options.momentum_form(MomentumForm::HeavyBall);
  }
  if (muon.at("decay_lr") == "lr*scale") {
    options.decay_lr(DecayLr::Adjusted);
  }
  if (!muon.at("normuon_beta2").is_null()) {
    options.muon_beta2(muon.at("normuon_beta2"));
  }
  return options;
}

MuonOptions adamw_options(const Json& adamw) {
  MuonOptions options(adamw.at("lr").get<double>());
  options.algorithm("adamw")
      .weight_decay(adamw.at("weight_decay"))
      .eps(adamw.at("eps"))
      .betas({adamw.at("betas").at(0), adamw.at("betas").at(1)});
  return options;
}

bool is_supported(const Json& muon) {
  return muon.at("split_sizes").is_null() || muon.at("split_rule") == "separate";
}

} // namespace muon::testing
