#include "option_json.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include <muon/algorithm.h>

#include "option_names.h"

namespace muon::detail {
namespace {

template <typename T>
Json or_null(bool is_given, T value) {
  return is_given ? Json(std::move(value)) : Json();
}

Json integers(const std::vector<std::int64_t>& values) {
  if (values.empty()) {
    return {};
  }
  return Json::Array(values.begin(), values.end());
}

// A schedule is its name where it is one of libmuon's as it stands.
Json schedule_to_json(const Schedule& schedule) {
  const std::vector<std::string> names = schedule_names();
  if (std::find(names.begin(), names.end(), schedule.name) != names.end() &&
      find_schedule(schedule.name).coefficients == schedule.coefficients) {
    return schedule.name;
  }
  Json::Array rows;
  for (const Coefficients& row : schedule.coefficients) {
    rows.emplace_back(Json::Array(row.begin(), row.end()));
  }
  return rows;
}

template <typename Value>
Json word(const Names<Value>& names, const Value& value) {
  return std::string(to_name(names, value));
}

// What a value of the file is read as; ValueError naming option and value.
class Reader {
 public:
  Reader(std::string option, const Json& value, const std::string& context)
      : option_(std::move(option)), value_(value), context_(context) {}

  bool is_null() const {
    return value_.is_null();
  }
  bool is_list() const {
    return value_.get_if<Json::Array>() != nullptr;
  }
  double number() const {
    if (const auto* whole = value_.get_if<std::int64_t>()) {
      return static_cast<double>(*whole);
    }
    return get<double>("a number");
  }
  bool flag() const {
    return get<bool>("true or false");
  }
  std::int64_t integer() const {
    return get<std::int64_t>("a whole number");
  }
  const std::string& text() const {
    return get<std::string>("a text");
  }
  template <typename Value>
  Value named(const Names<Value>& names) const {
    try {
      return from_name(names, option_, text());
    } catch (const c10::ValueError& error) {
      TORCH_CHECK_VALUE(false, context_, error.what_without_backtrace());
    }
  }
  std::vector<Reader> items() const {
    std::vector<Reader> readers;
    for (const Json& item : get<Json::Array>("a list")) {
      readers.emplace_back(option_, item, context_);
    }
    return readers;
  }
  std::vector<std::int64_t> integers() const {
    std::vector<std::int64_t> values;
    for (const Reader& item : is_null() ? std::vector<Reader>{} : items()) {
      values.push_back(item.integer());
    }
    return values;
  }
  [[noreturn]] void fail(const std::string& wanted) const {
    const std::string shown = value_.dump();
    TORCH_CHECK_VALUE(
        false, context_, "expected ", option_, " to be ", wanted, ", got ", shown.substr(0, 80));
  }

 private:
  template <typename T>
  const T& get(const char* wanted) const {
    const T* value = value_.get_if<T>();
    if (value == nullptr) {
      fail(wanted);
    }
    return *value;
  }

  std::string option_;
  const Json& value_;
  const std::string& context_;
};

Schedule read_schedule(const Reader& reader, const std::string& context) {
  try {
    if (!reader.is_list()) {
      return find_schedule(reader.text());
    }
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, context, error.what_without_backtrace());
  }
  std::vector<Coefficients> rows;
  for (const Reader& row : reader.items()) {
    const std::vector<Reader> numbers = row.items();
    if (numbers.size() != 3) {
      reader.fail("a schedule's name or a list of triples");
    }
    rows.push_back({numbers[0].number(), numbers[1].number(), numbers[2].number()});
  }
  return Schedule::custom(std::move(rows));
}

Betas read_betas(const Reader& reader) {
  const std::vector<Reader> pair = reader.items();
  if (pair.size() != 2) {
    reader.fail("a pair of numbers");
  }
  return {pair[0].number(), pair[1].number()};
}

using Set = std::function<void(MuonOptions&, const Reader&)>;

// The options whose JSON is one plain value.
const std::map<std::string_view, Set>& plain_setters() {
  static const std::map<std::string_view, Set> setters = {
      {"lr", [](auto& o, const Reader& r) { o.lr(r.number()); }},
      {"weight_decay", [](auto& o, const Reader& r) { o.weight_decay(r.number()); }},
      {"eps", [](auto& o, const Reader& r) { o.eps(r.number()); }},
      {"lr_multiplier", [](auto& o, const Reader& r) { o.lr_multiplier(r.number()); }},
      {"momentum", [](auto& o, const Reader& r) { o.momentum(r.number()); }},
      {"momentum_form", [](auto& o, const Reader& r) { o.momentum_form(r.named(kMomentumForm)); }},
      {"nesterov", [](auto& o, const Reader& r) { o.nesterov(r.flag()); }},
      {"maximize", [](auto& o, const Reader& r) { o.maximize(r.flag()); }},
      {"cautious", [](auto& o, const Reader& r) { o.cautious(r.flag()); }},
      {"decay_lr", [](auto& o, const Reader& r) { o.decay_lr(r.named(kDecayLr)); }},
      {"muon_beta2", [](auto& o, const Reader& r) { o.muon_beta2(r.number()); }},
      {"betas", [](auto& o, const Reader& r) { o.betas(read_betas(r)); }},
      {"amsgrad", [](auto& o, const Reader& r) { o.amsgrad(r.flag()); }},
      {"compute_dtype", [](auto& o, const Reader& r) { o.compute_dtype(r.named(kComputeDtype)); }},
      {"nonfinite", [](auto& o, const Reader& r) { o.nonfinite(r.named(kNonFinite)); }},
      {"rows", [](auto& o, const Reader& r) { o.rows(r.integers()); }},
      {"cols", [](auto& o, const Reader& r) { o.cols(r.integers()); }},
      {"flatten", [](auto& o, const Reader& r) { o.flatten(r.flag()); }},
      {"split_sizes", [](auto& o, const Reader& r) { o.split_sizes(r.integers()); }},
      {"split_dim", [](auto& o, const Reader& r) { o.split_dim(r.integer()); }},
      {"complex_dim", [](auto& o, const Reader& r) { o.complex_dim(!r.is_null()); }}};
  return setters;
}

// Those that null leaves to the library.
const std::map<std::string_view, Set>& optional_setters() {
  static const std::map<std::string_view, Set> setters = {
      {"adjust_lr_fn", [](auto& o, const Reader& r) { o.adjust_lr(r.named(kAdjustLr)); }},
      {"ns_steps", [](auto& o, const Reader& r) { o.ns_steps(r.integer()); }},
      {"normalization", [](auto& o, const Reader& r) { o.normalization(r.named(kNormalization)); }},
      {"norm_factor", [](auto& o, const Reader& r) { o.norm_factor(r.number()); }},
      {"batch_dims", [](auto& o, const Reader& r) { o.batch_dims(r.integer()); }},
      {"num_heads", [](auto& o, const Reader& r) { o.num_heads(r.integer()); }}};
  return setters;
}

void set_option(
    MuonOptions& options, const std::string& name, const Json& value, const std::string& context) {
  const Reader reader(name, value, context);
  if (name == "ns_coefficients") {
    options.schedule(read_schedule(reader, context));
  } else if (const auto plain = plain_setters().find(name); plain != plain_setters().end()) {
    plain->second(options, reader);
  } else {
    const auto found = optional_setters().find(name);
    TORCH_CHECK_VALUE(
        found != optional_setters().end(), context, "\"", name,
        "\" is no option of this version; load the file with the version that wrote it");
    if (!reader.is_null()) {
      found->second(options, reader);
    }
  }
}

} // namespace

Json::Object options_to_json(const MuonOptions& o) {
  const GroupSpec spec = o.spec();
  const Schedule& schedule = o.schedule();
  const auto steps = static_cast<std::int64_t>(schedule.coefficients.size());
  const Json schedule_json = schedule_to_json(schedule);
  const bool is_named = schedule_json.get_if<std::string>() != nullptr;
  Json::Object json = {
      {"lr", o.lr()},
      {"weight_decay", o.weight_decay()},
      {"momentum", o.momentum()},
      {"nesterov", o.nesterov()},
      {"ns_coefficients", schedule_json},
      {"eps", o.eps()},
      {"ns_steps", o.ns_steps().value_or(steps)},
      {"adjust_lr_fn", word(kAdjustLr, o.adjust_lr())},
      {"rows", integers(o.rows())},
      {"cols", integers(o.cols())},
      {"flatten", o.flatten()},
      {"batch_dims", or_null(o.batch_dims() >= 0, o.batch_dims())},
      {"complex_dim", or_null(o.complex_dim(), -1)},
      {"split_sizes", integers(o.split_sizes())},
      {"num_heads", or_null(o.num_heads() > 0, o.num_heads())},
      {"split_dim", o.split_dim()},
      {"maximize", o.maximize()},
      {"cautious", o.cautious()},
      {"compute_dtype", word(kComputeDtype, o.compute_dtype())},
      {"nonfinite", word(kNonFinite, o.nonfinite())},
      {"lr_multiplier", o.lr_multiplier()},
      {"momentum_form", word(kMomentumForm, o.momentum_form())},
      // A triple of the caller's may have come with a normalisation of its own.
      {"normalization",
       or_null(
           o.normalization().has_value() || !is_named,
           std::string(to_name(kNormalization, spec.orthogonalize.schedule.normalization)))},
      {"norm_factor",
       or_null(o.norm_factor().has_value() || !is_named, spec.orthogonalize.schedule.norm_factor)},
      {"decay_lr", word(kDecayLr, o.decay_lr())}};
  if (spec.algorithm == "adam" || spec.algorithm == "adamw") {
    json.emplace_back("betas", Json::Array{std::get<0>(o.betas()), std::get<1>(o.betas())});
    json.emplace_back("amsgrad", o.amsgrad());
  } else if (spec.algorithm == "normuon") {
    json.emplace_back("muon_beta2", o.muon_beta2());
  }
  return json;
}

MuonOptions options_from_json(
    const Json& json, const std::string& algorithm, const Json* own, const std::string& context) {
  MuonOptions options;
  try {
    options.algorithm(find_algorithm(algorithm).name);
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, context, error.what_without_backtrace());
  }
  const auto* members = json.get_if<Json::Object>();
  TORCH_CHECK_VALUE(members != nullptr, context, "expected options, got ", json.kind());
  for (const auto& [name, value] : *members) {
    set_option(options, name, value, context);
  }
  const auto* own_members = own == nullptr ? nullptr : own->get_if<Json::Object>();
  TORCH_CHECK_VALUE(
      own == nullptr || own_members != nullptr, context,
      "expected algorithm_options to be an object, got ", own == nullptr ? "" : own->kind());
  if (own_members != nullptr) {
    for (const auto& [name, value] : *own_members) {
      const auto* flag = value.get_if<bool>();
      options.algorithm_option(
          name,
          flag != nullptr ? static_cast<double>(*flag) : Reader(name, value, context).number());
    }
  }
  return options;
}

} // namespace muon::detail
