// MuonOptions in torch's archives.

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <muon/optimizer.h>

namespace muon {
namespace {

// What an option looks like in an archive. Enums are numbers: only append to them.

template <typename T>
c10::IValue pack(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return static_cast<std::int64_t>(value);
  } else {
    return value;
  }
}

c10::IValue pack(const AlgorithmOptions& options) {
  c10::Dict<std::string, double> packed;
  for (const auto& [name, value] : options) {
    packed.insert(name, value);
  }
  return packed;
}

template <typename T>
c10::IValue pack(const std::optional<T>& value) {
  return value ? pack(*value) : c10::IValue();
}

c10::IValue pack(const Schedule& schedule) {
  std::vector<double> numbers;
  for (const Coefficients& row : schedule.coefficients) {
    numbers.insert(numbers.end(), row.begin(), row.end());
  }
  return std::make_tuple(
      schedule.name, numbers, pack(schedule.normalization), schedule.norm_factor, schedule.source);
}

template <typename T>
void unpack(const c10::IValue& packed, T& value) {
  if constexpr (std::is_enum_v<T>) {
    value = static_cast<T>(packed.toInt());
  } else {
    value = packed.to<T>();
  }
}

void unpack(const c10::IValue& packed, AlgorithmOptions& options) {
  options.clear();
  for (const auto& entry : packed.to<c10::Dict<std::string, double>>()) {
    options[entry.key()] = entry.value();
  }
}

template <typename T>
void unpack(const c10::IValue& packed, std::optional<T>& value) {
  value.reset();
  if (!packed.isNone()) {
    unpack(packed, value.emplace());
  }
}

void unpack(const c10::IValue& packed, Schedule& schedule) {
  std::vector<double> numbers;
  std::int64_t normalization = 0;
  std::tie(schedule.name, numbers, normalization, schedule.norm_factor, schedule.source) =
      packed.to<std::tuple<std::string, std::vector<double>, std::int64_t, double, std::string>>();
  TORCH_CHECK_VALUE(
      numbers.size() % 3 == 0, "muon: expected (a, b, c) triples in the archive, got ",
      numbers.size(), " numbers");
  schedule.normalization = static_cast<Normalization>(normalization);
  schedule.coefficients.clear();
  for (std::size_t i = 0; i < numbers.size(); i += 3) {
    schedule.coefficients.push_back({numbers[i], numbers[i + 1], numbers[i + 2]});
  }
}

} // namespace

void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue packed;
  TORCH_CHECK_VALUE(
      archive.try_read("algorithm", packed),
      "muon: expected an archive of muon::Muon, got another optimizer's");
  // An option that an older file does not have keeps its initial value.
#define MUON_READ(role, type, name, ...) \
  if (archive.try_read(#name, packed)) { \
    unpack(packed, name##_.value);       \
    name##_.given = true;                \
  }
  MUON_OPTIONS(MUON_READ)
#undef MUON_READ
}

void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
#define MUON_WRITE(role, type, name, ...) archive.write(#name, pack(name##_.value));
  MUON_OPTIONS(MUON_WRITE)
#undef MUON_WRITE
}

} // namespace muon
