#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <muon/export.h>

namespace muon {

/// One step of the quintic iteration X <- aX + (bA + cA^2)X with A = XX^H,
/// as (a, b, c).
using Coefficients = std::array<double, 3>;

/// How a matrix is scaled before the iteration; f = Schedule::norm_factor.
enum class Normalization : std::uint8_t {
  Clamp, ///< X / max(f * |X|_F, eps), as torch.optim.Muon does
  Add, ///< X / (f * |X|_F + eps), as KellerJordan/Muon and muonium do
};

/// A Newton-Schulz schedule is data: which polynomial each step applies and
/// how the input is normalised for it.
struct MUON_API Schedule {
  std::string name; ///< a name that `find_schedule` knows, or "custom"
  std::vector<Coefficients> coefficients; ///< one triple a step
  Normalization normalization = Normalization::Clamp;
  double norm_factor = 1.0; ///< safety factor on the norm, positive
  std::string source; ///< where the numbers come from
  bool operator==(const Schedule&) const = default;

  /// A schedule of the caller's own coefficients, normalised as torch does.
  static Schedule custom(std::vector<Coefficients> coefficients);

  /// The triples that `steps` iterations use: the first rows when fewer are
  /// asked for than the schedule has, the last row repeated when more;
  /// `nullopt` is the schedule's own length. Throws on a negative number.
  std::vector<Coefficients> take(std::optional<std::int64_t> steps) const;
};

/// The schedule called `name`: "muon", "polar_express",
/// "polar_express_paper", "you" or "cans". Throws std::exception (ValueError
/// in Python) that lists the names for any other.
MUON_API const Schedule& find_schedule(std::string_view name);

/// The names that `find_schedule` knows, in documentation order.
MUON_API std::vector<std::string> schedule_names();

} // namespace muon
