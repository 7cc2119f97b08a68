#include <cmath>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <muon/schedule.h>

namespace muon {
namespace {

// The paper scales every row but the last for a safety factor s: p(x / s).
Coefficients with_safety(const Coefficients& row, double s) {
  return {row[0] / s, row[1] / std::pow(s, 3), row[2] / std::pow(s, 5)};
}

Schedule muon_schedule() {
  return {
      "muon", std::vector<Coefficients>(5, {3.4445, -4.7750, 2.0315}), Normalization::Clamp, 1.0,
      "KellerJordan/Muon; torch.optim.Muon"};
}

Schedule polar_express() {
  return {
      "polar_express",
      {{8.156554524902461, -22.48329292557795, 15.878769915207462},
       {4.042929935166739, -2.808917465908714, 0.5000178451051316},
       {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
       {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
       {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}},
      Normalization::Add,
      1.02,
      "arXiv 2505.16932 for 5 steps with safety 2e-2 and cushion 2; muonium, microsoft/dion"};
}

Schedule polar_express_paper() {
  const std::vector<Coefficients> table = {
      {8.28721201814563, -23.595886519098837, 17.300387312530933},
      {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
      {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
      {3.3184196573706015, -2.488488024314874, 0.51004894012372},
      {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
      {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
      {1.8750014808534479, -1.2500016453999487, 0.3750001645474248}};
  Schedule schedule{
      "polar_express_paper",
      {},
      Normalization::Add,
      1.01,
      "arXiv 2505.16932, listing 1 with its safety factor 1.01"};
  for (const Coefficients& row : table) {
    schedule.coefficients.push_back(with_safety(row, 1.01));
  }
  schedule.coefficients.push_back({1.875, -1.25, 0.375});
  return schedule;
}

Schedule you() {
  return {
      "you",
      {{4.0848, -6.8946, 2.9270},
       {3.9505, -6.3029, 2.6377},
       {3.7418, -5.5913, 2.3037},
       {2.8769, -3.1427, 1.2046},
       {2.8366, -3.0525, 1.2012}},
      Normalization::Clamp,
      1.0,
      "YouJiacheng's coefficients, as in KellerJordan/modded-nanogpt"};
}

// The composed polynomial diverges just above 1 (slope 5e4 there), where rounding puts a matrix of
// rank one: hence a factor on the norm that the table itself does not ask for.
Schedule cans() {
  return {
      "cans",
      {{8.4703, -25.1081, 18.6293},
       {4.1828, -3.1087, 0.5806},
       {3.9619, -2.9541, 0.5630},
       {3.2866, -2.4647, 0.5074},
       {2.2737, -1.6447, 0.4162}},
      Normalization::Clamp,
      1.01,
      "arXiv 2506.10935, as in NVIDIA-NeMo/Emerging-Optimizers"};
}

const std::vector<Schedule>& schedules() {
  static const std::vector<Schedule> table = {
      muon_schedule(), polar_express(), polar_express_paper(), you(), cans()};
  return table;
}

} // namespace

Schedule Schedule::custom(std::vector<Coefficients> coefficients) {
  TORCH_CHECK_VALUE(
      !coefficients.empty(),
      "muon: expected at least one (a, b, c) triple, got none (ns_coefficients)");
  for (const Coefficients& row : coefficients) {
    for (const double value : row) {
      TORCH_CHECK_VALUE(std::isfinite(value), "muon: expected finite ns_coefficients, got ", value);
    }
  }
  return {"custom", std::move(coefficients), Normalization::Clamp, 1.0, "the caller"};
}

std::vector<Coefficients> Schedule::take(std::optional<std::int64_t> steps) const {
  const std::int64_t count = steps.value_or(static_cast<std::int64_t>(coefficients.size()));
  TORCH_CHECK_VALUE(count >= 0, "muon: expected ns_steps to be >= 0, got ", count);
  TORCH_CHECK_VALUE(
      !coefficients.empty() || count == 0, "muon: expected a schedule with coefficients, got none");
  std::vector<Coefficients> rows;
  rows.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto index = static_cast<std::size_t>(i);
    rows.push_back(index < coefficients.size() ? coefficients[index] : coefficients.back());
  }
  return rows;
}

const Schedule& find_schedule(std::string_view name) {
  for (const Schedule& schedule : schedules()) {
    if (schedule.name == name) {
      return schedule;
    }
  }
  TORCH_CHECK_VALUE(
      false, "muon: expected ns_coefficients to be a triple, a list of triples or one of ",
      c10::Join(", ", schedule_names()), ", got \"", name, "\"");
}

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const Schedule& schedule : schedules()) {
    names.push_back(schedule.name);
  }
  return names;
}

} // namespace muon
