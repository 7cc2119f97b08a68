#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>

#include <c10/util/Exception.h>

#include <muon/algorithm.h>
#include <muon/optimizer.h>

namespace muon {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

enum class Role { live, plan, run, note };

// --- Algorithms' own defaults, as torch.optim.Muon, AdamW and Adam have them. ---

double own_weight_decay(const Algorithm& algorithm) {
  if (!algorithm.is_elementwise()) {
    return 0.1;
  }
  return algorithm.name == "adam" ? 0.0 : 0.01;
}

double own_eps(const Algorithm& algorithm) {
  return algorithm.is_elementwise() ? 1e-8 : 1e-7;
}

AlgorithmOptions merged_algorithm_options(
    const Algorithm& algorithm, AlgorithmOptions given, const AlgorithmOptions& inherited) {
  given.insert(inherited.begin(), inherited.end());
  for (const AlgorithmOption& option : algorithm.options) {
    given.emplace(option.name, option.value);
  }
  return given;
}

// Options that only some of the algorithms have; one of the user's own may read any.
bool reads_betas(std::string_view algorithm) {
  return algorithm != "muon" && algorithm != "normuon";
}

bool reads_muon_beta2(std::string_view algorithm) {
  return algorithm != "muon" && algorithm != "adam" && algorithm != "adamw";
}

template <typename Enum>
void check_enum(Enum value, Enum last, std::string_view text, std::string_view who) {
  TORCH_CHECK_VALUE(
      value <= last, text, " ", static_cast<int>(value), " is not supported (", who, ")");
}

void check_dtype(
    std::optional<c10::ScalarType> dtype, std::string_view option, std::string_view who) {
  const bool supported = !dtype || *dtype == c10::kDouble || *dtype == c10::kFloat ||
      *dtype == c10::kHalf || *dtype == c10::kBFloat16;
  TORCH_CHECK_VALUE(
      supported, "muon: expected ", option, " to be float64, float32, bfloat16 or float16",
      option == "state_dtype" ? ", Char (int8), Int4 or Float8_e4m3fn" : "", ", got ", *dtype, " (",
      who, ")");
}

StateFormat format_of(std::optional<c10::ScalarType> state_dtype) {
  switch (state_dtype.value_or(c10::kFloat)) {
    case c10::ScalarType::Char:
      return StateFormat::Int8;
    case c10::ScalarType::Int4:
      return StateFormat::Int4;
    case c10::ScalarType::Float8_e4m3fn:
      return StateFormat::Fp8;
    default:
      return StateFormat::Plain;
  }
}

} // namespace

MuonOptions& MuonOptions::schedule(std::string_view name) {
  return schedule(find_schedule(name));
}

MuonOptions& MuonOptions::ns_coefficients(const Coefficients& triple) {
  return schedule(Schedule::custom(std::vector<Coefficients>(5, triple)));
}

MuonOptions& MuonOptions::ns_coefficients(std::vector<Coefficients> triples) {
  return schedule(Schedule::custom(std::move(triples)));
}

MuonOptions& MuonOptions::algorithm_option(const std::string& name, double value) {
  algorithm_options()[name] = value;
  return *this;
}

MuonOptions& MuonOptions::layout(const MatrixLayout& layout) {
  return rows(layout.rows)
      .cols(layout.cols)
      .flatten(layout.flatten)
      .batch_dims(layout.batch_dims)
      .complex_dim(layout.complex_dim)
      .split_sizes(layout.split_sizes)
      .num_heads(layout.num_heads)
      .split_dim(layout.split_dim);
}

MatrixLayout MuonOptions::layout() const {
  return {rows(),        cols(),        flatten(),   batch_dims(),
          complex_dim(), split_sizes(), num_heads(), split_dim()};
}

MuonOptions MuonOptions::resolved(const MuonOptions& defaults) const {
  const Algorithm& own = find_algorithm((algorithm_.given ? *this : defaults).algorithm());
  const Algorithm& theirs = find_algorithm(defaults.algorithm());
  const MuonOptions initial;

  MuonOptions base = defaults;
  if (own.is_elementwise() != theirs.is_elementwise()) {
    base.weight_decay_.given = base.eps_.given = false;
    base.betas_ = initial.betas_;
    base.amsgrad_ = initial.amsgrad_;
  }
  if (!reads_muon_beta2(own.name)) {
    base.muon_beta2_ = initial.muon_beta2_;
  }
  if (!base.weight_decay_.given) {
    base.weight_decay_.value = own_weight_decay(own);
  }
  if (!base.eps_.given) {
    base.eps_.value = own_eps(own);
  }
  if (rows_.given || cols_.given || flatten_.given || batch_dims_.given) {
    base.rows(initial.rows()).cols(initial.cols());
    base.flatten(initial.flatten()).batch_dims(initial.batch_dims());
  }
  if (split_sizes_.given || num_heads_.given) {
    base.split_sizes(initial.split_sizes()).num_heads(initial.num_heads());
  }

  MuonOptions result = *this;
  result.algorithm_options() = merged_algorithm_options(
      own, algorithm_options(),
      own.name == theirs.name ? defaults.algorithm_options() : AlgorithmOptions{});
#define MUON_INHERIT(role, type, name, ...)      \
  if constexpr (Role::role != Role::note) {      \
    if (!name##_.given) {                        \
      result.name##_.value = base.name##_.value; \
    }                                            \
    result.name##_.given = true;                 \
  }
  MUON_OPTIONS(MUON_INHERIT)
#undef MUON_INHERIT
  result.algorithm_.value = own.name;
  return result;
}

std::vector<std::string_view> MuonOptions::given() const {
  std::vector<std::string_view> names;
#define MUON_NAME(role, type, name, ...) \
  if (name##_.given) {                   \
    names.emplace_back(#name);           \
  }
  MUON_OPTIONS(MUON_NAME)
#undef MUON_NAME
  return names;
}

std::string_view MuonOptions::merge(const MuonOptions& other) {
  MuonOptions merged = *this;
#define MUON_MERGE(role, type, name, ...)                        \
  if (other.name##_.given) {                                     \
    if (name##_.given && name##_.value != other.name##_.value) { \
      return #name;                                              \
    }                                                            \
    merged.name##_ = other.name##_;                              \
  }
  MUON_OPTIONS(MUON_MERGE)
#undef MUON_MERGE
  *this = std::move(merged);
  return "";
}

void MuonOptions::check(std::string_view who) const {
  const auto check_number = [who](double value, std::string_view what, double high = kInfinity) {
    TORCH_CHECK_VALUE(value >= 0.0, what, " should be >= 0 but is: ", value, " (", who, ")");
    TORCH_CHECK_VALUE(
        value <= high, what, " should be <= ", high, " but is: ", value, " (", who, ")");
    TORCH_CHECK_VALUE(
        std::isfinite(value), what, " should be finite but is: ", value, " (", who, ")");
  };
  check_number(lr(), "Learning rate");
  check_number(momentum(), "momentum", 1.0);
  check_number(weight_decay(), "weight decay");
  check_number(eps(), "eps");
  check_number(lr_multiplier(), "lr_multiplier");
  check_number(muon_beta2(), "muon_beta2", std::nextafter(1.0, 0.0));
  const std::array<double, 2> beta{std::get<0>(betas()), std::get<1>(betas())};
  for (std::size_t i = 0; i < beta.size(); ++i) {
    TORCH_CHECK_VALUE(
        beta[i] >= 0.0 && beta[i] < 1.0, "Invalid beta parameter at index ", i, ": ", beta[i], " (",
        who, ")");
  }
  check_enum(adjust_lr(), AdjustLr::Unscaled, "Adjust learning rate function", who);
  check_enum(form(), Form::GramXRestart, "Form", who);
  check_enum(nonfinite(), NonFinite::Skip, "NonFinite", who);
  check_enum(momentum_form(), MomentumForm::HeavyBall, "MomentumForm", who);
  check_enum(decay_lr(), DecayLr::Adjusted, "DecayLr", who);
  check_enum(
      normalization().value_or(schedule().normalization), Normalization::Add, "Normalization", who);
  check_dtype(compute_dtype(), "compute_dtype", who);
  if (format_of(state_dtype()) == StateFormat::Plain) {
    check_dtype(state_dtype(), "state_dtype", who);
  }
  TORCH_CHECK_VALUE(
      !stochastic_rounding() || !split_master(),
      "muon: expected stochastic_rounding or split_master, got both (", who, ")");
  check_iteration(who);
  check_algorithm(who);
}

void MuonOptions::check_iteration(std::string_view who) const {
  const auto steps = ns_steps().value_or(static_cast<std::int64_t>(schedule().coefficients.size()));
  TORCH_CHECK_VALUE(steps >= 0, "ns_steps should be >= 0 but is: ", steps, " (", who, ")");
  TORCH_CHECK_VALUE(
      steps < 100,
      "Number of steps must be less than 100 for computational efficiency, but ns_steps is: ",
      steps, " (", who, ")");
  TORCH_CHECK_VALUE(
      steps == 0 || !schedule().coefficients.empty(),
      "muon: expected a schedule with coefficients, got none (", who, ")");
  const double factor = norm_factor().value_or(schedule().norm_factor);
  TORCH_CHECK_VALUE(
      factor > 0.0 && std::isfinite(factor), "norm_factor should be > 0 but is: ", factor, " (",
      who, ")");
  TORCH_CHECK_VALUE(
      batch_size() >= 0, "batch_size should be >= 1, or 0 for no limit, but is: ", batch_size(),
      " (", who, ")");
}

void MuonOptions::check_algorithm(std::string_view who) const {
  const Algorithm& own = find_algorithm(algorithm());
  const std::string& name = own.name;
  const MuonOptions initial;
  for (const auto& [option, value] : algorithm_options()) {
    const bool is_known = std::any_of(
        own.options.begin(), own.options.end(), [&](const auto& o) { return o.name == option; });
    TORCH_CHECK_VALUE(
        is_known, "muon: expected an option of algorithm \"", name, "\", got \"", option, "\" (",
        who, ")");
    TORCH_CHECK_VALUE(
        std::isfinite(value), option, " should be finite but is: ", value, " (", who, ")");
  }
  const auto refuse = [&](std::string_view option, std::string_view users) {
    TORCH_CHECK_VALUE(
        false, option, " is an option of ", users, ", but the group's algorithm is \"", name,
        "\" (", who, ")");
  };
  if (!reads_betas(name) && betas() != initial.betas()) {
    refuse("betas", "\"adam\" and \"adamw\"");
  }
  if (!reads_betas(name) && amsgrad()) {
    refuse("amsgrad", "\"adam\" and \"adamw\"");
  }
  if (!reads_muon_beta2(name) && muon_beta2() != initial.muon_beta2()) {
    refuse("muon_beta2", "\"normuon\"");
  }
}

GroupSpec MuonOptions::spec() const {
  GroupSpec spec;
  spec.algorithm = find_algorithm(algorithm()).name;
  spec.layout = layout();
  spec.adjust_lr = adjust_lr();
  spec.orthogonalize.schedule = schedule();
  spec.orthogonalize.schedule.normalization = normalization().value_or(schedule().normalization);
  spec.orthogonalize.schedule.norm_factor = norm_factor().value_or(schedule().norm_factor);
  spec.orthogonalize.steps = ns_steps();
  spec.orthogonalize.compute_dtype = compute_dtype();
  spec.orthogonalize.form = form();
  spec.batch_size = batch_size();
  spec.nonfinite = nonfinite();
  spec.amsgrad = amsgrad();
  spec.decoupled = spec.algorithm != "adam";
  spec.state_format = format_of(state_dtype());
  spec.stochastic_rounding = stochastic_rounding();
  spec.split_master = split_master();
  spec.offload = offload();
  return spec;
}

bool MuonOptions::same_plan(const MuonOptions& other) const {
  bool same = true;
#define MUON_COMPARE(role, type, name, ...)                            \
  if constexpr (Role::role == Role::plan || Role::role == Role::run) { \
    same = same && name##_.value == other.name##_.value;               \
  }
  MUON_OPTIONS(MUON_COMPARE)
#undef MUON_COMPARE
  return same;
}

void MuonOptions::keep_from(const MuonOptions& other) {
#define MUON_KEEP(role, type, name, ...)                               \
  if constexpr (Role::role == Role::run || Role::role == Role::note) { \
    name##_ = other.name##_;                                           \
  }
  MUON_OPTIONS(MUON_KEEP)
#undef MUON_KEEP
}

void MuonOptions::write_hyper(double* row) const {
  row[Hyper::kLr] = lr();
  row[Hyper::kWeightDecay] = weight_decay();
  row[Hyper::kMomentum] = momentum();
  row[Hyper::kEps] = eps();
  row[Hyper::kLrMultiplier] = lr_multiplier();
  std::tie(row[Hyper::kBeta1], row[Hyper::kBeta2]) = betas();
  row[Hyper::kMuonBeta2] = muon_beta2();
  row[Hyper::kNesterov] = nesterov() ? 1.0 : 0.0;
  row[Hyper::kMaximize] = maximize() ? 1.0 : 0.0;
  row[Hyper::kCautious] = cautious() ? 1.0 : 0.0;
  row[Hyper::kHeavyBall] = momentum_form() == MomentumForm::HeavyBall ? 1.0 : 0.0;
  row[Hyper::kDecayAdjusted] = decay_lr() == DecayLr::Adjusted ? 1.0 : 0.0;
  row += Hyper::kCount;
  for (const AlgorithmOption& option : find_algorithm(algorithm()).options) {
    const auto found = algorithm_options().find(option.name);
    *row++ = found == algorithm_options().end() ? option.value : found->second;
  }
}

double MuonOptions::get_lr() const {
  return lr();
}

void MuonOptions::set_lr(double lr) {
  this->lr(lr);
}

bool operator==(const MuonOptions& a, const MuonOptions& b) {
  bool same = true;
#define MUON_COMPARE(role, type, name, ...) same = same && a.name##_.value == b.name##_.value;
  MUON_OPTIONS(MUON_COMPARE)
#undef MUON_COMPARE
  return same;
}

} // namespace muon
